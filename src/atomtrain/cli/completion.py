"""`atom completion`: completes commands and options in bash, zsh and fish."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atomtrain.cli.parsing import parse
from atomtrain.errors import ConfigError, nearest
from atomtrain.training.options import option

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
  eval "$(atom completion bash)"                 in ~/.bashrc
  eval "$(atom completion zsh)"                  in ~/.zshrc, after compinit
  atom completion fish | source                  in config.fish"""
_BASH = """\
_atom() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "$command ${{COMP_WORDS[2]}}" in
{nested}
        esac
    fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    elif [ -z "$words" ]; then
        case "$command" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o bashdefault -F _atom atom
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """What a user can say to `atom completion`."""

    shell: str = option(None, f"One of {', '.join(SHELLS)}.", "SHELL")

    def __post_init__(self) -> None:
        if self.shell not in SHELLS:
            raise ConfigError(
                f"there is no completion for {self.shell!r}.{nearest(self.shell, SHELLS)} "
                f"Shells: {', '.join(SHELLS)}"
            )


def run(arguments: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    options = parse(
        CompletionOptions,
        arguments,
        prog="atom completion",
        about="Print what completes commands and options in a shell.",
        examples=_EXAMPLES,
        positional=("shell",),
    )
    from atomtrain.cli.parsers import all_parsers, options_of

    flags = {
        words: [flag for action in options_of(parser) for flag in action.option_strings]
        for words, parser in all_parsers().items()
    }
    make = _fish if options.shell == "fish" else _bash
    text = make(flags)
    sys.stdout.write(_ZSH + text if options.shell == "zsh" else text)
    return 0


def _bash(flags: Mapping[str, Sequence[str]]) -> str:
    from atomtrain.cli.main import COMMANDS

    cases, nested = [], []
    for name in COMMANDS:
        below = [words.split()[1] for words in flags if words.startswith(f"{name} ")]
        offered = " ".join([*below, *flags.get(name, ())])
        cases.append(f'            {name}) words="{offered}" ;;')
    for words, own in flags.items():
        if " " in words:
            nested.append(f'            "{words}") words="{" ".join(own)}" ;;')
    return _BASH.format(
        commands=" ".join(COMMANDS), cases="\n".join(cases), nested="\n".join(nested)
    )


def _fish(flags: Mapping[str, Sequence[str]]) -> str:
    from atomtrain.cli.main import COMMANDS

    lines = ["complete -c atom -e"]
    for name, about in COMMANDS.items():
        said = about.replace("'", "\\'")
        lines.append(f"complete -c atom -n __fish_use_subcommand -a {name} -d '{said}'")
    for words, own in flags.items():
        name, _, below = words.partition(" ")
        when = f"__fish_seen_subcommand_from {name}"
        if below:
            lines.append(f"complete -c atom -n '{when}' -a {below}")
            when += f"; and __fish_seen_subcommand_from {below}"
        for flag in own:
            kind = "-l" if flag.startswith("--") else "-s"
            lines.append(f"complete -c atom -n '{when}' {kind} {flag.lstrip('-')}")
    return "\n".join((*lines, ""))
