"""Options that several commands share; a default is always the field's default in `Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from treadle.config import DEFAULTS as DEFAULTS

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A known name (see `treadle models`), a folder, a .gguf file or a Hugging Face id org/name.",
        show_default=True,
    ),
]
ModelsFile = Annotated[
    str | None,
    typer.Option(help="The file that names further models.", show_default="models.toml in the settings folder"),
]
ContextLength = Annotated[
    int | None,
    typer.Option(help="Most tokens of prompt and reply together.", show_default="what the model was trained for"),
]
MemoryLimit = Annotated[
    float | None,
    typer.Option("--memory-limit-gb", help="Most memory for model and caches, in GB.", show_default="from the device"),
]
Speculation = Annotated[
    str,
    typer.Option(help="Where guesses at the next tokens come from: auto, lookup, draft or off; the text is the same."),
]
DraftModel = Annotated[
    str,
    typer.Option(help="A smaller model that guesses: a name, auto (one that is on disk already and fits) or none."),
]
SpecprefillModel = Annotated[
    str | None,
    typer.Option(
        help="A smaller model that reads long prompts first and says what may be left out.", show_default="none"
    ),
]
Specprefill = Annotated[
    bool, typer.Option(help="Leave a part of long prompts out without being asked to; otherwise where a request asks.")
]
SpecprefillThreshold = Annotated[int, typer.Option(help="Tokens that are not cached, beyond which that is done.")]
SpecprefillKeep = Annotated[float, typer.Option(help="Share of these tokens that is computed, up to 1.")]
Compile = Annotated[
    str,
    typer.Option(
        help="Compute steps of few tokens in few operations, compiled as a whole: auto (where faster), on or off."
    ),
]
CacheGb = Annotated[
    float | None,
    typer.Option(
        help="Most memory for computed prompts, in GB; 0 turns the prefix cache off.",
        show_default="a fifth of the working set, 0.25 to 8",
    ),
]
CacheIdle = Annotated[float, typer.Option(help="Seconds until a computed prompt that nobody uses is dropped.")]
KvBits = Annotated[
    str,
    typer.Option(
        help='Bits of a running sequence\'s keys and values: auto, 16 (exact), 8, 4, or keys/values like "8/4".',
    ),
]
KvGroupSize = Annotated[int, typer.Option(help="Values that share a scale in packed rows: 32, 64 or 128.")]
KvRecent = Annotated[int, typer.Option(help="Newest tokens whose keys and values are read exactly.")]
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
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")]
Port = Annotated[int, typer.Option("--port", "-p", help="Port to listen on.")]
MaxRows = Annotated[int, typer.Option(help="Most requests that are answered at once.")]
MaxWaiting = Annotated[int, typer.Option(help="Most requests that wait; more get 429.")]
OnBusy = Annotated[str, typer.Option(help="What a request meets while others run: batch, queue or preempt.")]
PrefillChunk = Annotated[
    int | None, typer.Option(help="Most prompt tokens in one step (512 on a CPU, 2048 on Metal, 4096 on CUDA).")
]
PrefillShare = Annotated[float, typer.Option(help="Share of the time for new prompts while replies stream.")]
PrefillStall = Annotated[
    float, typer.Option(help="Longest pause in seconds that a new prompt puts into running replies.")
]
RequestTimeout = Annotated[float | None, typer.Option(help="Most seconds for one request.", show_default="none")]
Drain = Annotated[float, typer.Option(help="Seconds that running requests get to finish at shutdown.")]
KeepAlive = Annotated[float, typer.Option(help="Longest silence of a stream in seconds before a comment is sent.")]
MaxBody = Annotated[float, typer.Option(help="Largest request body in MB.")]
RateLimit = Annotated[
    int | None, typer.Option(help="Most requests per minute for each key or address.", show_default="none")
]
LogFormat = Annotated[str, typer.Option(help="How the log on stderr is written: text or json.")]
LogPrompts = Annotated[bool, typer.Option("--log-prompts", help="Write the text of prompts into the log.")]
ModelIdle = Annotated[
    float | None,
    typer.Option(help="Seconds until a model that nobody uses is unloaded.", show_default="never"),
]
ModelWait = Annotated[
    float, typer.Option(help="Longest wait in seconds for a model that has to make room for another.")
]

AllowImageUrls = Annotated[
    bool, typer.Option("--allow-image-urls", help="Fetch images from http(s) addresses of the internet.")
]
ImageMaxMp = Annotated[float, typer.Option(help="Megapixels above which an image is scaled down at once.")]
ImageCacheMb = Annotated[float, typer.Option(help="Most memory for encoded images that are remembered, in MB.")]

KEYS_VARIABLE = "TREADLE_API_KEYS"


def settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """A command's options as values of `Config`; keys come from the environment where no option gives any."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if not values["api_keys"]:
        keys = environment.get(KEYS_VARIABLE, "").split(",")
        values["api_keys"] = tuple(key.strip() for key in keys if key.strip())
    return values
