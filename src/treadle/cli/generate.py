"""`treadle generate`: one reply, then exit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.cli import options
from treadle.config import Config

if TYPE_CHECKING:
    from treadle.output.stream import Event


def generate(
    model: options.Model = options.DEFAULTS["model"],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text; - reads it from stdin.")] = "-",
    system: options.System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Report tokens and times on stderr.")] = False,
    context_length: options.ContextLength = options.DEFAULTS["context_length"],
    memory_limit_gb: options.MemoryLimit = options.DEFAULTS["memory_limit_gb"],
) -> None:
    """Answer one prompt on stdout.

    treadle generate -p "Name three rivers." --temperature 0

    echo "Once upon a time" | treadle generate gemma3-270m --raw --max-tokens 50
    """
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out.")
    from treadle.cli.session import opened

    text = sys.stdin.read() if prompt == "-" else prompt
    values = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
    }
    config = Config.of(model=model, context_length=context_length, memory_limit_gb=memory_limit_gb)
    with opened(config) as session:
        if raw:
            done = session.complete({"prompt": text, **values}, show)
        else:
            first = [] if system is None else [{"role": "system", "content": system}]
            done = session.chat({"messages": [*first, {"role": "user", "content": text}], **values}, show)
    print()
    if stats:
        print(summary(done), file=sys.stderr)


def show(text: str) -> None:
    """Write a piece of text at once."""
    print(text, end="", flush=True)


def summary(done: Event) -> str:
    """One line about a finished reply."""
    usage = done.usage
    if usage is None:
        return "nothing was generated"
    rate = usage.completion_tokens / usage.decode_s if usage.decode_s > 0 else 0.0
    return (
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached) in {usage.prefill_s:.2f} s, "
        f"reply {usage.completion_tokens} tokens in {usage.decode_s:.2f} s ({rate:.1f} per second), "
        f"ended by {done.finish}"
    )
