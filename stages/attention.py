"""Where a decoder's heads look: their weights for a text, and a page that draws them.

`rlhf eval RUN --attention TEXT`, or by hand: `python -m rlhf.stages.attention MODEL PAGE TEXT`.
"""

import base64
import sys
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.errors import RefusedError
from rlhf.stages.disk import replace_text
from rlhf.stages.logs import be_quiet
from rlhf.stages.models import load_policy, read_tokenizer
from rlhf.stages.streams import go_on_unread
from rlhf.stages.text_limits import num_positions

MAX_TOKENS = 64
"""Of a page: with more, the tokens along the axes could not be read."""
_CELL = 14  # of a large map, in the units of its viewBox


@dataclass(frozen=True)
class AttentionMaps:
    """How much each head looks at which token. L layers, H heads, T tokens."""

    tokens: list[str]
    weights: Tensor  # [L,H,T,T], float32 on the CPU; row t is what token t looks at, and sums to 1


@torch.no_grad()
def attention_maps(
    model: str | PreTrainedModel, text: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> AttentionMaps:
    """Attention weights of a causal language model (or the folder or hub id of one) reading a text.

    A model that is given itself needs its tokenizer, too. Raises RefusedError for a text without tokens, or with more
    than the model has positions.
    """
    if isinstance(model, str):
        tokenizer = tokenizer or read_tokenizer(model)
        model = load_policy(model, tokenizer)
    if tokenizer is None:
        raise RefusedError("attention_maps: a model in memory needs its tokenizer; give it as the third argument")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    positions = num_positions(model)
    if not 0 < len(ids) <= positions:
        raise RefusedError(f"the text has {len(ids)} tokens, and the model takes 1 to {positions}; give another text")
    usual, training = model.config._attn_implementation, model.training
    model.eval()
    model.set_attn_implementation("eager")  # the only one that keeps the weights
    try:
        found = model(input_ids=torch.tensor([ids], device=model.device), output_attentions=True, use_cache=False)
    finally:
        model.set_attn_implementation(usual)
        model.train(training)
    weights = torch.stack([layer[0].float().cpu() for layer in found.attentions])
    return AttentionMaps([tokenizer.decode([number]) for number in ids], weights)


def draw_page(maps: AttentionMaps, title: str) -> str:
    """One self-contained HTML page: a small map per layer and head, and a large one with the tokens along its axes.

    Raises RefusedError for more than MAX_TOKENS tokens.
    """
    size = len(maps.tokens)
    if size > MAX_TOKENS:
        raise RefusedError(f"the text has {size} tokens, and up to {MAX_TOKENS} can be drawn; give a shorter text")
    num_layers, num_heads = maps.weights.shape[:2]
    heads = [(layer, head) for layer in range(num_layers) for head in range(num_heads)]
    images = "".join(
        f'<symbol id="m{layer}-{head}" viewBox="0 0 {size} {size}" preserveAspectRatio="none"><image width="{size}" '
        f'height="{size}" href="data:image/png;base64,{_png(maps.weights[layer, head])}"/></symbol>'
        for layer, head in heads
    )
    small = "".join(
        f'<a href="#l{layer}h{head}" style="grid-area: {layer + 2} / {head + 2}" title="layer {layer}, head {head}">'
        f'<svg viewBox="0 0 1 1"><use href="#m{layer}-{head}" width="1" height="1"/></svg></a>'
        for layer, head in heads
    )
    names = "".join(f'<b style="grid-area: 1 / {head + 2}">{head}</b>' for head in range(num_heads))
    names += '<b style="grid-area: 1 / 1">head</b>'
    names += "".join(f'<b style="grid-area: {layer + 2} / 1">layer {layer}</b>' for layer in range(num_layers))
    labels = [_label(token) for token in maps.tokens]
    margin = 12 + 7 * max(map(len, labels))
    whole = margin + size * _CELL
    large = "".join(
        f'<figure id="l{layer}h{head}"><figcaption>Layer {layer}, head {head}</figcaption><svg viewBox="0 0 {whole} '
        f'{whole}"><use href="#axes"/><use href="#m{layer}-{head}" x="{margin}" y="{margin}" width="{size * _CELL}" '
        f'height="{size * _CELL}"/></svg></figure>'
        for layer, head in heads
    )
    axes = f'<symbol id="axes" viewBox="0 0 {whole} {whole}">{_axes(labels, margin)}</symbol>'
    return _PAGE.format(
        title=escape(title), num_heads=num_heads, images=images, axes=axes, small=names + small, large=large,
        width=min(1.3 * whole + 30, 900), num_tokens=size,
    )  # fmt: skip


def _png(weights: Tensor) -> str:
    """Weights [T,T] as one blue, the less transparent the more: it shows on a light page and on a dark one."""
    image = Image.fromarray((weights.sqrt() * 255).round().to(torch.uint8).numpy())
    image.putpalette([47, 111, 214] * 256)
    file = BytesIO()
    image.save(file, "PNG", transparency=bytes(range(256)), optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _label(token: str) -> str:
    """A token as it stands at an axis: short, with its spaces seen."""
    shown = token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    return shown if len(shown) <= 11 else f"{shown[:10]}…"


def _axes(labels: list[str], margin: int) -> str:
    """The tokens that look down the side, those that are looked at along the top, and a frame."""
    found, whole = [], len(labels) * _CELL
    for place, label in enumerate(map(escape, labels)):
        middle = margin + (place + 0.5) * _CELL
        found.append(f'<text x="{margin - 5}" y="{middle:g}" text-anchor="end">{label}</text>')
        found.append(f'<text transform="translate({middle:g} {margin - 5}) rotate(-90)">{label}</text>')
    return "".join(found) + f'<rect x="{margin}" y="{margin}" width="{whole}" height="{whole}"/>'


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ --page: #f7f7f5; --card: #fff; --ink: #1d1f24; --muted: #667085; --line: #d5d7dd; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #131418; --card: #1c1e24; --ink: #e7e8ec; --muted: #9aa1b0; --line: #3a3e48; }}
}}
body {{ margin: 0; padding: 1.5rem; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
p {{ margin: 0 0 1rem; max-width: 46rem; color: var(--muted); }}
main {{ display: grid; gap: 1.5rem; align-items: start; justify-content: start; }}
main {{ grid-template-columns: repeat(2, minmax(0, auto)); }}
.small {{ display: grid; gap: .3rem; padding: 2px; overflow-x: auto; }}
.small {{ grid-template-columns: auto repeat({num_heads}, minmax(1.8rem, 5.5rem)); }}
.small b {{ font-size: .75rem; font-weight: 500; color: var(--muted); align-self: center; text-align: center; }}
.small svg, figure svg {{ display: block; width: 100%; background: var(--card); }}
.small a {{ border: 1px solid var(--line); }}
.small a:hover, .small a:focus {{ outline: 2px solid #2f6fd6; }}
image {{ image-rendering: pixelated; }}
.large {{ width: min({width:g}px, max(48vw, 26rem)); position: sticky; top: .5rem; }}
figure {{ display: none; margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--line); }}
figure:target, .large:not(:has(:target)) figure:first-child {{ display: block; }}
figcaption {{ font-weight: 600; }}
@media (prefers-color-scheme: dark) {{ image {{ filter: brightness(1.6); }} }}
@media (max-width: 60rem) {{ main {{ grid-template-columns: minmax(0, 1fr); }} .large {{ width: 100%; }} }}
text {{ font: 11px ui-monospace, monospace; fill: var(--muted); dominant-baseline: central; }}
rect {{ fill: none; stroke: var(--line); }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>What each head looks at, over {num_tokens} tokens. A row is a token that looks, a column one that is looked at; no
token sees those after it. The bluer, the more: shades grow with the square root of a weight. Choose a small map to see
it large.</p>
<svg width="0" height="0" style="position: absolute"><defs>{axes}{images}</defs></svg>
<main>
<div class="small">{small}</div>
<div class="large">{large}</div>
</main>
</body>
</html>
"""


def main(arguments: list[str]) -> None:
    """Draw the attention of MODEL over TEXT into PAGE, and print its path."""
    model, page, text = arguments
    be_quiet()
    maps = attention_maps(model, text)
    replace_text(Path(page), draw_page(maps, f"Attention: {Path(model).parent.name or model}"))
    print(page)


if __name__ == "__main__":
    go_on_unread()
    try:
        main(sys.argv[1:])
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
