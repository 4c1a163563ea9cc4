"""Options that several commands share; a default is always the field's default in `Config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

import typer

from treadle.config import Config

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Config)}

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A known name (see `treadle models`), a folder, a .gguf file or a Hugging Face id org/name.",
        show_default=True,
    ),
]
ContextLength = Annotated[
    int | None,
    typer.Option(help="Most tokens of prompt and reply together.", show_default="what the model was trained for"),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option("--memory-limit-gb", help="Most memory for model and caches, in GB.", show_default="from the device"),
]
CacheGb = Annotated[
    float | None,
    typer.Option(
        help="Most memory for computed prompts, in GB; 0 turns the prefix cache off.",
        show_default="a fifth of the working set, 0.25 to 8",
    ),
]
CacheIdle = Annotated[float, typer.Option(help="Seconds until a computed prompt that nobody uses is dropped.")]
CacheQuantization = Annotated[
    str, typer.Option(help="How computed prompts that are not in use are kept: off (as they are), 8 or 4 bits.")
]
CacheGroupSize = Annotated[int, typer.Option(help="Values that share a scale in a quantised prompt: 32, 64 or 128.")]
CacheMinTokens = Annotated[
    int, typer.Option(help="Shorter pieces of a prompt are neither quantised nor written to disk.")
]
CacheDir = Annotated[
    str | None,
    typer.Option(help="A folder that keeps computed prompts over restarts.", show_default="none"),
]
CacheDisk = Annotated[float, typer.Option(help="Most space that --cache-dir may take, in GB.")]
CheckpointEvery = Annotated[
    int,
    typer.Option(help="Tokens between the points at which recurrent and windowed layers can be taken up again."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens of a reply.", show_default="until the model ends"),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 always takes the likeliest token.", show_default="the model's own"),
]
TopP = Annotated[
    float | None,
    typer.Option(help="Draw from this share of the probability.", show_default="the model's own"),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Draw from that many tokens; 0: from all.", show_default="the model's own"),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.", show_default="random")]
System = Annotated[str | None, typer.Option("--system", "-s", help="A system message before the first one.")]
ApiKeys = Annotated[
    list[str],
    typer.Option(
        "--api-key",
        help="A key that clients must send; repeat it for several. Better in TREADLE_API_KEYS, parted by commas, "
        "for other users of the machine can read options.",
        show_default="none",
    ),
]
AllowedOrigins = Annotated[
    list[str],
    typer.Option(
        "--allowed-origin",
        help='A web page\'s origin (https://name) that may use the server; repeatable, "*" is all.',
        show_default="those of this machine",
    ),
]
AllowedHosts = Annotated[
    list[str],
    typer.Option(
        "--allowed-host",
        help='A name by which clients may call the server; repeatable, "*" is all.',
        show_default="localhost, or any when --host is open to the network",
    ),
]

KEYS_VARIABLE = "TREADLE_API_KEYS"


def settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """A command's options as values of `Config`; keys come from the environment where no option gives any."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if not values["api_keys"]:
        keys = environment.get(KEYS_VARIABLE, "").split(",")
        values["api_keys"] = tuple(key.strip() for key in keys if key.strip())
    return values
