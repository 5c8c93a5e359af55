"""The house keeps its order: who may import whom, and that every name is documented."""

import ast
import builtins
import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from tokenize import COMMENT, tokenize

import click
import pytest

import ckpttool
import ckpttool.problems
from ckpttool.cli.main import COMMANDS, main
from ckpttool.cli.recipe import COMMANDS as RECIPE_COMMANDS
from ckpttool.cli.strategy import COMMANDS as STRATEGY_COMMANDS
from tests.support.corpus import GOLDEN

ROOT = Path(ckpttool.__file__).parent
FLOORS = [  # lowest first; rooms of one floor do not know each other
    {"problems", "wording", "concurrency", "lazy", "secret", "system", "typed"},
    {"model"},
    {"formats"},
    {"storage"},
    {"strategy_files"},
    {"transaction"},
    {"discovery"},
    {"checkpoint"},
    {"checks"},
    {"planning", "execution"},
    {"operations"},
    {"keywords"},
    {"api", "cli"},
]
ROOMS = set().union(*FLOORS)
STRANGERS = {"execution": {"checks"}}  # that do not know a room below them
DISK = {"os", "io", "pathlib", "h5py", "numpy", "tempfile", "shutil", "mmap", "fcntl", "glob"}
WORLD = {"click", "rich", "concurrent", "threading", "multiprocessing", "subprocess", "sys"}
WORLD |= {"ctypes", "resource", "signal", "socket", "time"}
EXTRAS = {
    "ckpttool.execution.dask": {"dask", "distributed"},
    "ckpttool.execution.mpi": {"mpi4py"},
    "ckpttool.api": {"ml_dtypes", "torch", "typing_extensions"},
    "ckpttool.operations.open": {"ml_dtypes", "torch"},
}
GROUPS = {
    "ckpttool.cli": COMMANDS,
    "ckpttool.cli.recipe": RECIPE_COMMANDS,
    "ckpttool.cli.strategy": STRATEGY_COMMANDS,
}
MODULES = sorted(ROOT.rglob("*.py"))
DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef

# One worker parses the modules; the other saves the time and the memory.
pytestmark = pytest.mark.xdist_group("architecture")

DOCUMENTS = [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").rglob("*.md"))]
NAME_IN_PROSE = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(module: str) -> str | None:
    room = [*module.split("."), ""][1]
    return room if room in ROOMS else None


def imports(path: Path, tree: ast.AST | None = None) -> set[str]:
    """Every module that is imported, at the top, inside a function or by its name in a string.

    A group of commands imports the module of a command by the name of the command.
    """
    found = set()
    for node in ast.walk(tree or tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"ckpttool(\.(?!json)\w+)+", str(node.value)
        ):
            found.add(str(node.value))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "package":
            package = ast.literal_eval(node.value)
            found |= {f"{package}.{command}" for command in GROUPS[package]}
    return found


def defined_in(tree: ast.Module | ast.ClassDef, is_deep: bool = True) -> set[str]:
    """The names that a module or class defines; ``is_deep``: also those in its functions."""
    found = {one.name for one in tree.body if isinstance(one, DEFINITIONS)}
    nodes = [one for one in tree.body if is_deep or not isinstance(one, DEFINITIONS)]
    for node in (inner for one in nodes for inner in ast.walk(one)):
        if isinstance(node, DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found


def packages(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imports(path)}


def test_there_are_modules_in_every_room_and_nothing_beside_them():
    assert {room_of(name) for name in NAMES} == {*ROOMS, None}
    assert {name for name in NAMES if room_of(name) is None} <= {
        "ckpttool",
        "ckpttool.__main__",
        "ckpttool._version",
    }


@pytest.mark.source
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_only(path):
    name = name_of(path)
    here = room_of(name)
    if here is None:  # the package itself and __main__ stand outside and may use every room
        return
    floor = next(number for number, rooms in enumerate(FLOORS) if here in rooms)
    below = set().union({here}, *FLOORS[: floor or 1]) - STRANGERS.get(here, set())
    ours = {module for module in imports(path) if module.split(".")[0] == "ckpttool"}
    above = {module for module in ours if room_of(module) not in {*below, None}}
    assert not above, f"{name} imports from a higher floor, or from its own"
    if here != "cli":
        public = {m for m in ours if room_of(m) is None and not m.startswith("ckpttool._version")}
        message = "the public names, but for the version, belong to users and to the command line"
        assert public in (set(), {"ckpttool", "ckpttool.__version__"}, {"ckpttool"}), message


def test_imports_by_a_name_in_a_string_are_seen():
    assert imports(ROOT / "cli" / "main.py") > {f"ckpttool.cli.{command}" for command in COMMANDS}
    assert imports(ROOT / "formats" / "__init__.py") > {"ckpttool.formats.hdf5"}


def test_no_module_imports_itself_by_way_of_others():
    ways = {}
    for path in MODULES:
        tree = copy.copy(tree_of(path))
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ]
        found = {module if module in NAMES else "" for module in imports(path, tree)}
        ways[name_of(path)] = found - {"", "ckpttool", name_of(path)}
    while True:
        ends = {name for name, found in ways.items() if not found & ways.keys()}
        if not ends:
            break
        ways = {name: found for name, found in ways.items() if name not in ends}
    circles = {name: found & ways.keys() for name, found in ways.items()}
    # Who is imported by nobody else here only leads to a circle, and is none.
    while idle := circles.keys() - set().union(*circles.values()):
        circles = {name: found for name, found in circles.items() if name not in idle}
    assert not circles


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_what_its_room_may_know(path):
    name, known = name_of(path), packages(path)
    if room_of(name) in ("problems", "wording", "model"):
        assert not known & (DISK | WORLD)
    if not name.startswith("ckpttool.cli"):
        assert not known & {"click", "rich"}
    if name != "ckpttool.formats.hdf5":
        assert "h5py" not in known
    if name != "ckpttool.formats.encryption":
        assert "cryptography" not in known
    others = {"click", "rich", "numpy", "h5py", "cryptography", "yaml", "msgspec"}
    others |= EXTRAS.get(name, set())
    assert known <= {*sys.stdlib_module_names, "ckpttool", *others}


SYSTEM = "ckpttool.system"
LACKING = {  # of `os` on macOS or on some Linux
    "copy_file_range",
    "eventfd",
    "getrandom",
    "memfd_create",
    "pidfd_open",
    "posix_fadvise",
    "posix_fallocate",
    "preadv",
    "pwritev",
    "sched_getaffinity",
    "sendfile",
    "splice",
}


@pytest.mark.source
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_one_module_knows_what_systems_lack(path):
    if name_of(path) == SYSTEM:
        return
    assert "resource" not in packages(path)
    nodes = [*ast.walk(tree_of(path))]
    dotted = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    assert not {*dotted} & {f"os.{name}" for name in LACKING}
    assert not {*dotted} & {"sys.platform", "os.name", "platform.system"}
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    assert not [text for text in texts if text.startswith(("/proc/", "/sys/"))]


def is_overload(decorator):
    return isinstance(decorator, ast.Name) and decorator.id == "overload"


@pytest.mark.source
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_and_every_public_name_is_documented(path):
    tree = tree_of(path)
    public = [n for n in tree.body if isinstance(n, DEFINITIONS) and not n.name.startswith("_")]
    public = [n for n in public if not any(map(is_overload, n.decorator_list))]
    for owner in [node for node in public if isinstance(node, ast.ClassDef)]:
        methods = [node for node in owner.body if isinstance(node, DEFINITIONS)]
        public += [node for node in methods if not node.name.startswith("_")]
    assert ast.get_docstring(tree)
    assert not [node.name for node in public if ast.get_docstring(node) is None]


@pytest.mark.source
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_function_has_more_than_eight_parameters(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            names = [one.arg for one in (*node.args.args, *node.args.kwonlyargs)]
            assert len([name for name in names if name not in ("self", "cls")]) <= 8, node.name


@pytest.mark.source
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_library_neither_prints_nor_exits(path):
    calls = [node.func for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    assert not names & {"print", "exit", "quit", "eval", "exec", "breakpoint"}
    dotted = {ast.unparse(call) for call in calls if isinstance(call, ast.Attribute)}
    exits = {"sys.exit"} if name_of(path) == "ckpttool.__main__" else {"sys.exit", "os._exit"}
    assert not dotted & {*exits, "sys.stdout.write", "pickle.loads", "pickle.load"}
    unpickles = name_of(path).endswith(".hyper_parallel")  # what an allow-list admits
    assert unpickles == ("pickle" in imports(path))


def codes_given(tree):
    """The codes that a module gives to diagnostics, by itself or through its own functions."""
    makers = {"Diagnostic", "each", "diagnostic"}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        names = [ast.unparse(code) for code in first_arguments(function, makers)]
        if function.args.args and function.args.args[0].arg in names:
            makers.add(function.name)
    codes = first_arguments(tree, makers)
    for function in functions:
        for code in first_arguments(function, makers):
            codes += values_of(function, ast.unparse(code))
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    codes += [node.value for node in keywords if node.arg == "code"]
    codes = [one for code in codes for one in alternatives(code)]
    return {code.value for code in codes if isinstance(code, ast.Constant)}


def first_arguments(tree, makers):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(call, ast.unparse(call.func).rpartition(".")[2]) for call in calls if call.args]
    return [call.args[0] for call, name in named if name in makers]


def values_of(function, name):
    """The expressions that a function gives to a name by assignments and loops over tuples."""
    for node in ast.walk(function):
        pairs = []
        if isinstance(node, ast.Assign):
            pairs = [(target, one) for target in node.targets for one in alternatives(node.value)]
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            pairs = [(node.target, one) for one in node.iter.elts]
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                of = dict(zip(map(ast.unparse, target.elts), value.elts, strict=True))
                yield from [of[name]] if name in of else []
            elif ast.unparse(target) == name:
                yield value


def alternatives(expression):
    if isinstance(expression, ast.IfExp):
        return [*alternatives(expression.body), *alternatives(expression.orelse)]
    return [expression]


@pytest.mark.source
def test_every_code_in_the_table_is_given_to_a_diagnostic_and_no_other():
    from ckpttool.problems import CODES

    trees = [tree_of(path) for path in MODULES if path.name != "problems.py"]
    errors = [one for one in vars(ckpttool.problems).values() if hasattr(one, "exit_code")]
    of_errors = {error.code for error in errors}
    assert set().union(of_errors, *map(codes_given, trees)) == set(CODES)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "arguments",
    [
        "--version",
        "--help",
        "merge --help",
        "inspect --help",
        "reshard --help",
        "verify --help",
        "diff --help",
        "help damaged",
        "completion zsh",
        f"inspect {GOLDEN / 'append_dict_scalars' / 'src' / 'rank_0' / 'checkpoint-2_10.ckpt'}",
        f"inspect {GOLDEN / 'append_dict_scalars' / 'src_strategy.ckpt'}",
    ],
)
def test_a_command_that_needs_no_arrays_loads_none_of_the_heavy_packages(arguments):
    code = (
        "import sys\n"
        "from ckpttool.cli.main import main\n"
        f"main({arguments.split()}, standalone_mode=False)\n"
        "heavy = {'numpy', 'h5py', 'rich', 'cryptography', 'yaml', 'multiprocessing'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


START = ("", "_version", "cli", "cli.groups", "cli.main", "cli.signals")
START += ("lazy", "problems", "wording")


def loaded_by(*arguments: str, beside: str = "click, msgspec") -> tuple[set[str], set[str]]:
    """Return the modules of the package that a command loads, and all that it loads ``beside``."""
    code = (
        f"import {beside}, sys\n"
        "before = set(sys.modules)\n"
        "from ckpttool.cli.main import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "print(*set(sys.modules) - before, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {*done.stderr.split()}
    return {name[9:] for name in loaded if name.startswith("ckpttool")}, loaded


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_start_loads_click_msgspec_and_next_to_nothing_else(argument):
    ours, loaded = loaded_by(argument)
    assert ours == {*START}
    assert len(loaded) <= 23  # it was 80 when every command was loaded


@pytest.mark.parametrize("command", ["inspect", "merge", "verify", "diff"])
def test_the_help_of_a_command_loads_its_options_and_the_formats(command):
    ours, loaded = loaded_by(command, "--help")
    rooms = {name.partition(".")[0] for name in ours if name not in START}
    assert rooms == {
        "cli",
        "concurrency",
        "formats",
        "keywords",
        "model",
        "secret",
        "system",
        "typed",
    }
    assert len(loaded) <= 125  # it was 175 when the steps of all commands were loaded


def test_inspecting_a_file_loads_no_plans():
    path = GOLDEN / "append_dict_scalars" / "src" / "rank_0" / "checkpoint-2_10.ckpt"
    ours, _ = loaded_by("inspect", str(path))
    assert not any(name.startswith("planning") for name in ours)
    assert not ours & {"operations.run", "execution.execute"}
    assert len(ours) <= 98


MOST_MODULES = {  # of the package, that a small run loads
    "merge SRC -s S -o OUT.h5 -q": 128,
    "reshard SRC -s S -d D -o OUT -q": 128,
    "convert SRC -o OUT --format safetensors -q": 127,
    "verify SRC -s S": 113,
    "inspect SRC -s S": 108,
    "diff SRC SRC -s S": 107,
    "strategy show S": 81,
}


@pytest.mark.parametrize(("line", "most"), MOST_MODULES.items())
def test_a_command_loads_only_what_it_needs(tmp_path, line, most):
    case = GOLDEN / "reshard_8_to_4"
    names = {"SRC": "src", "S": "src_strategy.ckpt", "D": "dst_strategy.ckpt"}
    words = [str(case / names[word]) if word in names else word for word in line.split()]
    words = [word.replace("OUT", str(tmp_path / "o")) for word in words]
    ours, loaded = loaded_by(*words, beside="click, h5py, numpy")  # old ones load more themselves
    assert len(ours) <= most
    assert loaded & {"numpy.ma", "secrets", "multiprocessing", "rich"} == set()


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_a_merge_into_another_format_loads_no_hdf5_and_starts_nothing(tmp_path, suffix):
    case = GOLDEN / "reshard_8_to_4"
    words = ("merge", str(case / "src"), "-s", str(case / "src_strategy.ckpt"), "-q", "-o")
    ours, loaded = loaded_by(
        *words, str(tmp_path / f"merged{suffix}"), beside="click, msgspec, numpy"
    )
    assert len(ours) <= 128
    assert not ours & {"formats.hdf5", "strategy_files.handwritten"}
    assert not loaded & {"h5py", "rich", "socket", "subprocess", "yaml"}


ABOUT_OUTPUTS = {  # functions that look at the destination
    "ckpttool.cli.help": {"write_examples"},
    "ckpttool.planning.preflight": {
        "find_space",
        "_partial_bytes",
        "_blocked",
        "document_problem",
        "_location_problem",
        "_partial_problem",
    },
    "ckpttool.planning.targets": {"ShardedOutput.problems"},
    "ckpttool.cli.main": {"_output_errors"},
}


def without(tree: ast.Module, names: set[str]) -> ast.Module:
    """A module without some of its functions, all of which must be there."""
    left = set(names)

    class Filter(ast.NodeTransformer):
        owner = ""

        def visit_ClassDef(self, node):
            self.owner = f"{node.name}."
            self.generic_visit(node)
            self.owner = ""
            return node

        def visit_FunctionDef(self, node):
            name = f"{self.owner}{node.name}"
            left.discard(name)
            return None if name in names else node

    found = Filter().visit(copy.deepcopy(tree))
    assert not left
    return found


@pytest.mark.source
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_one_module_lists_stats_and_opens_the_files_of_sources(path):
    name = name_of(path)
    rooms = {"formats", "discovery", "strategy_files", "planning", "operations", "cli"}
    if room_of(name) not in rooms or name in ("ckpttool.formats.local", "ckpttool.formats.hdf5"):
        return
    tree = without(tree_of(path), ABOUT_OUTPUTS.get(name, set()))
    words = {"iterdir", "glob", "rglob", "listdir", "scandir", "walk", "stat", "lstat"}
    words |= {"is_file", "is_dir", "is_symlink", "exists", "read_bytes", "read_text", "access"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = {one.func.attr for one in calls if isinstance(one.func, ast.Attribute)}
    assert not methods & words
    for call in calls:
        function = ast.unparse(call.func)
        assert function.rpartition(".")[2] != "open", "a file is opened by formats.local"


def test_every_command_is_in_a_module_of_its_name():
    context = click.Context(main)
    assert [main.get_command(context, name).name for name in COMMANDS] == list(COMMANDS)
    assert main.get_command(context, "options") is None


def test_the_public_names_are_all_there_and_no_others():
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name) is not None
    tree = ast.parse(Path(ckpttool.__file__).read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    exported = {one.asname: node.module for node in imports for one in node.names if one.asname}
    assert exported == {**ckpttool._MODULES, "__version__": "ckpttool._version"}
    with pytest.raises(AttributeError, match="nonsense"):
        ckpttool.nonsense  # noqa: B018


@cache
def members() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in (node for path in MODULES for node in ast.walk(tree_of(path))):
        if isinstance(one, ast.ClassDef):
            found.setdefault(one.name, set()).update(defined_in(one))
    return found


@cache
def module_names() -> set[str]:
    return set().union(*(defined_in(tree_of(path), is_deep=False) for path in MODULES))


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        module, names = ".".join(parts[:depth]), parts[depth:]
        if module in NAMES and not names:
            return True  # `__main__` is not imported
        try:
            found = import_module(module)
        except ImportError:
            continue
        for at, part in enumerate(names):
            if part in members().get(names[at - 1], ()) and at == len(names) - 1 > 0:
                return True  # an attribute of instances
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def is_known(name: str, path: Path) -> bool:
    first, _, rest = name.partition(".")
    if not rest:
        here = defined_in(tree_of(path)) | imported_as(path).keys()
        return name in here | module_names() | sys.stdlib_module_names or hasattr(builtins, name)
    names = {name, f"ckpttool.{name}", f"{imported_as(path).get(first, first)}.{rest}"}
    return rest in members().get(first, ()) or any(map(exists, names))


def imported_as(path: Path) -> dict[str, str]:
    found = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found |= {alias.asname or alias.name: start + alias.name for alias in node.names}
    return found


def prose(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            yield ast.get_docstring(node) or ""
    with path.open("rb") as file:
        yield from (one.string for one in tokenize(file.readline) if one.type == COMMENT)


@pytest.mark.source
@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_the_names_in_docstrings_and_comments_are_in_the_code(path):
    found = {name for text in prose(path) for name in NAME_IN_PROSE.findall(text)}
    assert [name for name in sorted(found) if not is_known(name, path)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_names_in_the_documentation_are_in_the_code(path):
    rooms = "|".join(sorted(room for room in ROOMS if (ROOT / room).is_dir()))
    text = path.read_text(encoding="utf-8")
    names = re.findall(rf"`((?:ckpttool|{rooms})(?:\.(?!json|safetensors)\w+)+)(?:\(\))?`", text)
    assert [name for name in names if not exists(name) and not exists(f"ckpttool.{name}")] == []
    files = re.findall(rf"`((?:{rooms})/(?!rank_)[\w/]*(?:\.py)?)`", text)
    places = ROOT, ROOT.parent / "tests"
    assert [name for name in files if not any((place / name).exists() for place in places)] == []


def test_the_description_of_the_architecture_shows_every_room():
    text = (ROOT.parent / "docs" / "development" / "architecture.md").read_text(encoding="utf-8")
    assert len(re.findall(r"`\w+\.\w+\.\w+`", text)) > 20
    listed = set(re.findall(r"^  (\w+)(?:/|\.py)", text, re.MULTILINE))
    assert listed == {*ROOMS, "__init__"}


@pytest.mark.source
def test_the_description_of_the_tests_names_every_builder_and_no_file_that_is_gone():
    text = (ROOT.parent / "docs" / "development" / "testing.md").read_text(encoding="utf-8")
    builders = text.split("## What tests build on")[1].split("## Markers")[0]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", builders, re.MULTILINE)))
    support = (ROOT.parent / "tests" / "support").glob("[!_]*.py")
    assert sorted(named) == sorted(path.stem for path in support)
    paths = re.findall(r"`((?:tests|planning|e2e|formats)/[\w/]+\.py)`", text)
    tests = ROOT.parent / "tests"
    assert len(paths) > 5
    assert [one for one in paths if not (tests / one.removeprefix("tests/")).is_file()] == []


def test_the_record_of_a_run_is_behind_few_names():
    used = {
        module.removeprefix("ckpttool.transaction.")
        for path in MODULES
        if path.parent.name != "transaction"
        for module in imports(path)
        if re.fullmatch(r"ckpttool\.transaction\.\w+\.\w+", module)
    }
    assert used == {
        "finishing.finalize",
        "locks.is_held",
        "sealed_files.Manifest",
        "sealed_files.ManifestFile",
        "sealed_files.Written",
        "sealed_files.remedy_for",
        "outputs.output_problems",
        "sealed_files.written_strategies",
        "outputs.stale_files",
        "record.Transaction",
        "resume.Assignment",
        "resume.OutputOptions",
        "resume.inspect_previous_run",
        "sources.changed_sources",
        "sources.require_unmodified_sources",
        "states.Record",
        "states.describe_record",
        "states.find_unfinished_run",
        "set_strategy.RecordedSet",
        "set_strategy.read_recorded",
        "waiting.wait_while_busy",
    }


def test_one_function_of_sixty_lines_tells_the_story_of_a_run():
    tree = ast.parse(Path(ROOT, "operations", "run.py").read_text())
    (story,) = (node for node in tree.body if getattr(node, "name", "") == "convert")
    assert story.end_lineno - story.lineno < 60
    lines = ast.unparse(story)
    stages = ("load_job(", "look", "plan_outputs(", "preflight(", "raise_problems(", "execute(")
    places = [lines.index(stage) for stage in stages]
    assert places == sorted(places)
