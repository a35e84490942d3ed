"""`trt-engine completion SHELL`: the script that makes Tab complete verbs, options and choices."""

from __future__ import annotations

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit

__all__ = ["command"]

_INSTALL = {
    "bash": "echo 'eval \"$(trt-engine completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(trt-engine completion zsh)\"' >> ~/.zshrc",
    "fish": "trt-engine completion fish > ~/.config/fish/completions/trt-engine.fish",
}


@click.command(
    short_help="Shell completion.",
    epilog='For this shell only: eval "$(trt-engine completion bash)". The line for every new shell is said on stderr.',
)
@click.argument("shell", type=click.Choice(list(_INSTALL)))
@options.common
def command(talk: Talk, shell: str) -> None:
    """The completion script for SHELL on stdout, to be evaluated by it."""
    import logging

    from click.shell_completion import ShellComplete, get_completion_class

    from trt_engine.cli.main import PROG
    from trt_engine.cli.shell import COMPLETE, cli

    found = get_completion_class(shell)
    assert found is not None  # the argument is one of click's own three
    # `ShellComplete.source`, not bash's own, which starts a bash to read its version
    script = ShellComplete.source(found(cli, {}, PROG, COMPLETE))
    logging.getLogger(__name__).info("for every new %s: %s", shell, _INSTALL[shell])
    doc = document(
        "completion",
        {"shell": shell, "script": script, "install": _INSTALL[shell]},
        command=options.spelled_command(),
    )
    emit(talk, doc, script)
