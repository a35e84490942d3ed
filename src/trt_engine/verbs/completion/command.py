"""`trt-engine completion SHELL`: the script for shell completion of verbs, options and choices."""

from __future__ import annotations

import click

from trt_engine.command_line import COMPLETE, PROG, options
from trt_engine.command_line.output import document, emit

_INSTALL = {
    "bash": "echo 'eval \"$(trt-engine completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(trt-engine completion zsh)\"' >> ~/.zshrc",
    "fish": "trt-engine completion fish > ~/.config/fish/completions/trt-engine.fish",
}


@options.verb(
    short_help="Shell completion.",
    epilog='For this shell only: eval "$(trt-engine completion bash)". The line for every new shell is printed on stderr.',
)
@click.argument("shell", type=click.Choice(list(_INSTALL)))
def command(shell: str) -> None:
    """Print the completion script for SHELL, which the shell evaluates."""
    import logging

    from click.shell_completion import ShellComplete, get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click supports all three choices
    # `ShellComplete.source`, not bash's own, which starts a bash to read its version
    script = ShellComplete.source(found(click.get_current_context().find_root().command, {}, PROG, COMPLETE))
    logging.getLogger(__name__).info("for every new %s: %s", shell, _INSTALL[shell])
    doc = document(
        "completion",
        {"shell": shell, "script": script, "install": _INSTALL[shell]},
        command=options.command_line(),
    )
    emit(doc, script)
