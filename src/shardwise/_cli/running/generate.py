"""The command `generate`: a Hugging Face folder continues prompts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..._base import claim_stdout, read_json, require_form, tell, tell_json, tell_part, working
from ..help_text import MODEL
from ..laid_out import make_mesh, named_strategy
from ..options import (
    Format,
    FormatOption,
    MinBytesOption,
    OnOption,
    StrategyOption,
    command,
)

if TYPE_CHECKING:
    from ..._layout import Layout
    from ...models import Config

_TEXT = "The text"
_DTYPES = ("float32", "bfloat16", "float16")


@command(
    help="""Continue prompts with a model in a Hugging Face folder.

PATH is a folder with config.json, .safetensors files and tokenizer.json, of Llama 2 and 3, Qwen 2.5
and 3, Gemma 2 and 3, Mistral or Mixtral. The weights are read straight into their shards. One prompt
is streamed; the continuations of several are printed at the end. Prompts are passed as they are:
chat templates are not applied. It needs "shardwise[generate]".

Examples:

\b
  shardwise generate ./llama-3.2-1b --prompt "The capital of France is"

\b
  shardwise generate ./llama-3.2-1b --prompt "Once upon a time" --tokens 200 --temperature 0.8 \\
    --top-p 0.95 --seed 1 --mesh data=2,model=4 --strategy tensor

Exit status: 0 generated, 1 the folder's weights have findings, 2 could not run."""
)
def generate(
    path: Annotated[str, typer.Argument(metavar="PATH", help="The folder.")],
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="What is continued; may be repeated.",
            rich_help_panel=_TEXT,
        ),
    ],
    tokens: Annotated[
        int,
        typer.Option(
            "--tokens",
            metavar="N",
            help="The most tokens to generate.",
            min=1,
            rich_help_panel=_TEXT,
        ),
    ] = 64,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            metavar="T",
            help="What logits are divided by; 0 takes the likeliest token.",
            rich_help_panel=_TEXT,
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Draw only from the likeliest tokens whose probabilities reach P.",
            rich_help_panel=_TEXT,
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", metavar="N", help="The seed of what is drawn.", rich_help_panel=_TEXT
        ),
    ] = 0,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="AXES",
            help="Axes and sizes, such as data=2,model=4; one device by default.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    on: OnOption = "here",
    strategy: StrategyOption = None,
    min_bytes: MinBytesOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="NAME",
            help="The dtype of weights and cache; that of the folder by default.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    format: FormatOption = Format.text,
) -> None:
    """Generates text."""
    tokenizer = _tokenizer(path)
    claim_stdout()
    from ...models import config_from_hf
    from ...models import generate as continued

    config = config_from_hf(path, scan=True)
    said = read_json(Path(path) / "config.json")
    kind = dtype or _said(said, "dtype") or _said(said, "torch_dtype") or "float32"
    if kind not in _DTYPES:
        raise ValueError(f"--dtype {kind} is not supported: give one of {', '.join(_DTYPES)}")
    rows = [tokenizer.encode(text).ids for text in prompt]
    if empty := [text for text, row in zip(prompt, rows, strict=True) if not row]:
        raise ValueError(f"--prompt {empty[0]!r} has no tokens")
    devices = _mesh(mesh, on)
    laid_out, make = _laid_out(
        config, devices, strategy, min_bytes, len(rows), max(map(len, rows)) + tokens, kind
    )
    model = _loaded(make, laid_out, path)
    # Sequences that only fill the batch repeat the first.
    batch = model.cache.tokens.shape[0]
    filled = [*rows, *[rows[0]] * (batch - len(rows))]
    steps = continued(
        model,
        filled,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        layout=laid_out,
    )
    ends = _ends(path, said)
    found: list[list[int]] = [[] for _ in rows]
    stopped = [False] * len(rows)
    text = _Stream(tokenizer, rows[0]) if len(rows) == 1 and format is Format.text else None
    for step in steps:
        for number in range(len(rows)):
            if not stopped[number]:
                stopped[number] = int(step[number]) in ends
                if not stopped[number]:
                    found[number].append(int(step[number]))
        if text is not None:
            text.show(found[0])
        if all(stopped):
            break
    if text is not None:
        tell_part("\n")
        return
    answers = [
        {
            "prompt": given,
            "text": _continuation(tokenizer, row, ids),
            "tokens": ids,
            "ended": bool(ended),
        }
        for given, row, ids, ended in zip(prompt, rows, found, stopped, strict=True)
    ]
    if format is Format.json:
        from ..._mesh import show_mesh

        tell_json({"dtype": kind, "axes": show_mesh(laid_out.mesh), "answers": answers})
        return
    for answer in answers:
        tell(f"{answer['prompt']}{answer['text']}")


def _tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]
    except ImportError as error:
        raise ValueError(
            'generate needs a tokenizer library, which is not installed: pip install "shardwise[generate]"'
        ) from error
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{path} has no tokenizer.json: give a folder with a model and a tokenizer"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # what the library raises has no class of its own
        raise ValueError(f"{file} cannot be read: {error}") from error


def _said(config: dict[str, Any], key: str) -> Any:
    """Returns what config.json says, of the text model if it has one inside."""
    return config.get(key, (config.get("text_config") or {}).get(key))


def _ends(path: str, said: dict[str, Any]) -> set[int]:
    """Returns the tokens that end a text."""
    file = Path(path) / "generation_config.json"
    try:
        generation = read_json(file, {"*": Any}) if file.is_file() else {}
        ends = generation.get("eos_token_id", _said(said, "eos_token_id"))
        require_form(ends, int | list[int] | None, "eos_token_id")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


def _mesh(axes: str | None, on: str) -> Any:
    """Returns the mesh of the options: without any, the first device."""
    import jax

    from ..._compile import start_backends
    from ..._mesh import mesh

    if on == "none":
        raise ValueError("--on none has no devices to generate on: give here or cpu:8")
    if on != "here":
        # No accelerator is needed: without this, JAX looks for one and warns about it.
        jax.config.update("jax_platforms", "cpu")
    if axes is not None:
        return make_mesh(axes, on)
    if on != "here":
        raise ValueError(f"--on {on} needs --mesh: give axes and sizes, such as data=2,model=4")
    start_backends()
    return mesh("data=1", on=jax.local_devices()[:1])


def _laid_out(
    config: Config,
    mesh: Any,
    strategy: str | None,
    min_bytes: str | None,
    prompts: int,
    length: int,
    dtype: str,
) -> tuple[Layout, Any]:
    """Returns the layout of the decoder with its cache, and the function that makes it."""
    import jax
    from flax import nnx

    from ..._layout import layout
    from ..._mesh import DATA_AXES
    from ...models import Decoder

    parts = (strategy or "").split("+")
    if "pipeline" in parts:
        raise ValueError(f"--strategy {strategy}: a cache is not pipelined; use tensor, fsdp or dp")
    data = tuple(axis for axis in mesh.shape if axis in DATA_AXES)
    ways = math.prod(mesh.shape[axis] for axis in data)
    batch = -(-prompts // ways) * ways

    def make() -> Decoder:
        model = Decoder(dataclasses.replace(config, param_dtype=dtype), rngs=nnx.Rngs(0))
        model.init_cache(batch, length)
        return model

    # Weights are replicated where no rule splits them; dp would also replicate the cache.
    kept = "+".join(part for part in parts if part not in ("dp", "")) or None
    with working("laying out the decoder"):
        planned = layout(
            make,
            mesh,
            named_strategy(None, kept, min_bytes),
            logical={"batch": data} if data else None,
            inputs=jax.ShapeDtypeStruct((batch,), "int32"),
            method="decode",
        )
    return planned, make


def _loaded(make: Any, layout: Layout, path: str) -> Any:
    from ..._weights import WeightsError, load

    try:
        with working(f"loading {path}"):
            return load(make, layout, path)
    except WeightsError as error:
        tell(str(error))
        raise typer.Exit(1) from error


def _continuation(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    """Returns the text of tokens that follow a prompt, with the space between, if there is one."""
    before = tokenizer.decode(prompt)
    both = tokenizer.decode([*prompt, *ids])
    return both[len(before) :] if both.startswith(before) else tokenizer.decode(ids)


class _Stream:
    """A text that is printed as it grows."""

    def __init__(self, tokenizer: Any, prompt: list[int]):
        self.tokenizer, self.prompt, self.shown = tokenizer, prompt, ""

    def show(self, ids: list[int]) -> None:
        text = _continuation(self.tokenizer, self.prompt, ids)
        # The bytes of one character may be spread over several tokens.
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(self.shown):
            return
        tell_part(text[len(self.shown) :])
        self.shown = text
