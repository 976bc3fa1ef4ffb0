"""The command `atom`: finds the subcommand and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType

from atomtrain import __version__
from atomtrain.cli.parsing import complain, shown
from atomtrain.errors import AtomError, ConfigError, nearest
from atomtrain.progress import listening

COMMANDS = {
    "train": "train a model, alone or with other peers",
    "init": "ask a few questions, look at the machine, and write a recipe",
    "import": "turn a recipe of axolotl or LLaMA-Factory into one of ATOM",
    "schema": "print the JSON schema of recipe files",
    "plan": "say how a model would train on a machine, how fast, and what would be faster",
    "simulate": "say what many peers would reach on given links, with ATOM and as a pipeline",
    "dashboard": "show a run in the browser",
    "watch": "show a run in the terminal",
    "generate": "continue a text with a trained model",
    "export": "write a trained model as a Hugging Face folder",
    "evaluate": "held-out loss, perplexity and bits per byte of a trained model",
    "data": "look at training data: tokens, answers, examples",
    "swarm": "look at a swarm from outside: its status, and the way to a peer",
    "identity": "show a peer's id, and make its key",
    "prove": "train a small model swapped and in an ordinary loop, and compare every bit",
    "report": "pack what a run did into one file for an issue, without data and addresses",
    "doctor": "check this machine, and say what to change",
    "completion": "complete commands and options in bash, zsh or fish",
    "bench": "measure; prints one JSON object with --json",
}
_MEANT = {
    **dict.fromkeys(("finetune", "fit", "launch", "pretrain", "run", "sft", "tune"), "train"),
    **dict.fromkeys(("chat", "complete", "infer", "inference", "sample"), "generate"),
    **dict.fromkeys(("convert", "fuse", "merge", "merge-lora", "merge-weights", "push"), "export"),
    **dict.fromkeys(("preprocess", "tokenize"), "data"),
    **dict.fromkeys(("env", "info"), "doctor"),
    **dict.fromkeys(("studio", "tensorboard", "ui", "webui"), "dashboard"),
    **dict.fromkeys(("logs", "monitor", "tail", "top"), "watch"),
    **dict.fromkeys(("config", "new", "quickstart"), "init"),
    **dict.fromkeys(("estimate", "estimate-memory"), "plan"),
    **dict.fromkeys(("lm-eval", "perplexity"), "evaluate"),
}
"""What commands of other tools are called here, where the spelling tells nothing of it."""
_SERVED = "'atom generate' continues a text, 'atom export' writes a model for what serves it"
_FETCHED = "models come by their id: 'atom train --model ORG/NAME'"
_LISTED = "'atom dashboard runs' shows all runs in a folder"
_INSTEAD = {
    **dict.fromkeys(("api", "serve", "server", "vllm-serve"), _SERVED),
    **dict.fromkeys(("download", "fetch", "pull"), _FETCHED),
    **dict.fromkeys(("list", "ls", "ps"), _LISTED),
    **dict.fromkeys(("login", "logout"), "'hf auth login' is for that"),
    **dict.fromkeys(("lora", "qlora"), "give --lora to 'atom train', such as --lora r=8,alpha=16"),
    **{
        name: f"give --objective {name} to 'atom train'"
        for name in ("dpo", "kto", "orpo", "reward", "simpo")
    },
    "join": "'atom train --join RUN@ADDRESS' does that",
    "ping": "'atom swarm ping ADDRESS' does that",
    "quantize": "'atom export --gguf q8_0' writes narrow weights, --lora bits=4 trains on them",
    "resume": "'atom train --run NAME --resume' does that",
    "status": "'atom watch runs/RUN' shows a run, 'atom swarm status ADDRESS' a swarm",
    "stop": "Ctrl-C ends a run after its step, and saves it",
    "test": "'atom doctor' checks the machine, 'atom prove' the training",
    "upload": "'atom export --push ORG/NAME' does that",
}
"""What to do instead of commands of other tools that ATOM has no command for."""
_PACKAGES = {"bench": "atombench", "simulate": "atomresearch"}
"""Commands that are of a package of their own."""
_MODULES = {
    **dict.fromkeys(("data", "import", "schema"), "inputs"),
    **dict.fromkeys(("evaluate", "export", "generate"), "trained"),
    **dict.fromkeys(("doctor", "prove", "report"), "machine"),
    **dict.fromkeys(("dashboard", "watch"), "views"),
    **dict.fromkeys(("swarm", "identity"), "swarm"),
}
"""Modules that have several commands, each as a function `run_NAME`; of others it is `run`."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_FROM_THE_LEFT = "\r\x1b[K"
"""What empties the terminal's line."""
_USAGE = """usage: atom COMMAND [options]

Train language models far larger than your GPU's memory, alone or with other peers.

commands:
{commands}

examples:
  atom train                              two peers on the demo text
  atom train pretrain-small --steps 200   a ready recipe, or a YAML file of your own
  atom train --run mine --data 'books/*.txt'
  atom train --join mine@/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...
  atom plan gpt3-13b --gpu rtx-3090 --host-memory 256GiB
  atom generate runs/mine/peer-0 --prompt "Once upon a time"
  atom dashboard runs/mine
  atom bench swap --json

'atom COMMAND --help' tells more. Version {version}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # at exit nobody would see that it failed
    except AtomError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`atom ... | head`): nothing more to say.
        _drop_output()
        return 141
    except OSError as error:
        if error.filename is None and error.errno not in _FULL | {errno.EIO}:
            raise  # of no file
        complain(f"{error.filename or 'a file'} cannot be used: {error.strerror}; {_hint(error)}")
        try:
            sys.stdout.flush()
        except OSError:  # it is the output that cannot be written
            _drop_output()
        return 2


def is_installed(name: str) -> bool:
    package = _PACKAGES.get(name)
    return package is None or importlib.util.find_spec(package) is not None


def command_module(name: str) -> ModuleType:
    """Import the module that runs a command.

    Raises:
        ConfigError: the command is of a package that is not installed.
    """
    package = _PACKAGES.get(name, "atomtrain.cli")
    if not is_installed(name):
        raise ConfigError(
            f"'atom {name}' is of a package of its own, which is not installed; in a clone of the "
            "project, run 'pip install -e .'"
        )
    return importlib.import_module(f"{package}.{_MODULES.get(name, name)}")


def command_of(name: str) -> Callable[[list[str]], int]:
    """Return what runs a command, imported now; raises as `command_module`."""
    module = command_module(name)
    run: Callable[[list[str]], int] = getattr(module, f"run_{name}" if name in _MODULES else "run")
    return run


def _hint(error: OSError) -> str:
    """Return what to do about a file that cannot be used."""
    if error.errno in _FULL:
        return "make room or choose another place; 'atom train' goes on with --resume"
    if error.errno in _FORBIDDEN:
        return "choose another place, or change its owner"
    return "check the path"


def _drop_output() -> None:
    """Have what is still to be printed vanish, also at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<10} {about}" for name, about in COMMANDS.items())
        sys.stdout.write(_USAGE.format(commands=commands, version=__version__))
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"atom {__version__}\n")
        return 0
    name = arguments[0]
    if name.startswith("-"):
        raise ConfigError(
            f"the command comes first, such as 'atom train {name}'; see 'atom --help'"
        )
    if name == "atom":
        raise ConfigError("'atom' stands there twice; leave one out")
    if name not in COMMANDS:
        raise ConfigError(_advice(name))
    run = command_of(name)
    with listening(progress_line) if sys.stderr.isatty() else nullcontext():
        return run(arguments[1:])


def _advice(name: str) -> str:
    """Return what to tell of a command that does not exist."""
    given = name.lower().replace("_", "-")
    if given in _INSTEAD:
        return f"there is no command {name!r}; {_INSTEAD[given]}"
    meant = f" Did you mean {_MEANT[given]!r}?" if given in _MEANT else nearest(name, COMMANDS)
    return f"there is no command {name!r}.{meant} Commands: {', '.join(COMMANDS)}"


def progress_line(line: str) -> None:
    """Show how far something has come, in the terminal's last line, over what stood there."""
    columns = shutil.get_terminal_size().columns
    sys.stderr.write(f"{_FROM_THE_LEFT}{shown(line)[: columns - 1]}")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
