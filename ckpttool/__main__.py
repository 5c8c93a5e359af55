"""``python -m ckpttool``."""

from ckpttool.cli.main import main

if __name__ == "__main__":
    main()
