# Sourced by the other scripts: makes .venv if there is none, installs the package with the extras
# named in $EXTRA ("dev,docs") into it, and puts it first on the PATH.  Does nothing that is done
# already.
# Needs Python 3.10 or newer and nothing else; PYTHON names another than the one on the PATH, VENV
# another folder.

cd "$(dirname "$0")/.." || exit 1
VENV=${VENV:-.venv}

find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python 3.10 or newer found; install one, or name it: PYTHON=/path/to/python3 $0" >&2
    exit 1
}

if [ ! -x "$VENV/bin/python" ]; then
    python=$(find_python) || exit 1
    if ! "$python" -m venv "$VENV"; then
        rm -rf "$VENV"
        echo "This Python cannot make virtual environments; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
fi

# The stamp of each extra holds what was installed from; what changes there installs again.
wanted="$(cat pyproject.toml scripts/setup.sh | cksum) $PWD"
stamps=$(printf 'installed-from-%s ' package-alone $(echo "${EXTRA:-}" | tr , ' '))
for stamp in $stamps; do
    if [ "$(cat "$VENV/$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Setting up $VENV ..."
        # Type checkers see a folder on the path, not the import hook of the default mode.
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
            --config-settings editable_mode=compat -e ".${EXTRA:+[$EXTRA]}" || exit 1
        for stamp in $stamps; do echo "$wanted" >"$VENV/$stamp"; done
        break
    fi
done

PATH="$PWD/$VENV/bin:$PATH"
export PATH

# The tests start the program some thousand times; it is to be compiled once.
unset PYTHONDONTWRITEBYTECODE
