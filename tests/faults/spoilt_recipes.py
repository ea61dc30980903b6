"""Recipes that are wrong in every way a seeded fuzzer thinks of: as a tree, as text, as bytes."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import yaml
from faults_world import RECIPE
from fuzzing import ODDITIES, Case

HUGE = (10**30, -(10**30), 1e308, -1e308, 2**63, 10**12)
VALUES: tuple[Any, ...] = (
    None, True, False, "", " ", [], {}, [[]], [{}], [1, 2], ["a"], {"a": 1}, {"path": 1}, {"path": None}, -1, 0, 1,
    0.5, -0.5, 3, float("nan"), float("inf"), "nan", ".inf", "1e-5", "0x10", "١٢", "1_000", "12:30:45", "a" * 5000,
    "\0", "\n", "é" * 10, "\U0001f40d", "${seed}", "${nothing}", "${.}", "${..}", "${oc.env:NO_SUCH}", "${", "$}",
    "${oc.eval:1}", "${sft}", "???", "../../etc/passwd", "/dev/null", "/proc/self/mem", "~", "~nobody/x", "*",
    "mod:func", "os:nothing", "rlhf.nothing:x", "a/b/c", "no:", ":x", "-", "=", "documents.jsonl", "prompts.jsonl",
    "recipe.yaml", "null", "yes", b"\xff\x00", *HUGE,
)  # fmt: skip
TEXTS: tuple[bytes, ...] = (
    b"", b"\n", b"# nothing\n", b"hello", b"42", b"[]", b"{}", b"- a\n- b\n", b"null", b"--- a\n--- b\n",
    b"\xff\xfe\x00", b"%YAML 9.9\n---\na: 1\n", b"!!python/object/apply:os.system [touch hacked]",
    b"a: !!python/name:os.system\n", b"sft: !!set {a, b}\n", b"sft: !!binary aGVsbG8=\n", b"sft: &a [*a]\n",
    b"sft: &a {data: *a}\n", b"sft: *nothing\n", b"<<: *nothing\n", b"<<: {sft: {data: x}}\n", b"? [a, b]\n: c\n",
    b"? {a: b}\n: c\n", b"1: 2\nnull: 3\ntrue: 4\n", b"sft:\n\tdata: x\n", b"sft: {data: x\n", b"sft: 'x\n",
    b'sft: "\\x"\n', b"sft: |\n  text\n", b"sft: >\n", b"sft: @x\n", b"sft: `x`\n", b"sft: %x\n",
    b"sft: 2024-01-01\n", b"sft: 2024-13-45\n", b"seed: 0o8\n", b"\0", b"\x1b[31m", b"a: " * 300, b"[" * 3000,
    b"{a: " * 3000, b"- " * 3000, b"sft:\n  data: {path: x, options: {" + b"a: {" * 500,
    b"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    b"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n",
)  # fmt: skip
WORDS = (
    "sfx",
    "Pretrain",
    "ppo ",
    "learning_rate",
    "model",
    "data",
    "attempt",
    "__class__",
    "",
    "sft.data",
    "args",
    "lora",
)


def recipes(seed: int, number: int, run_share: float = 0.0) -> Iterator[Case]:
    """Mutated recipes for `rlhf plan`, a share of them for `rlhf run` of one step."""
    rng = random.Random(f"recipes {seed}")
    changes = [_set_value, _set_value, _set_value, _drop, _rename, _move, _add, _nest, _cut, _bytes, _lines, _whole]
    one_step = [f"pretrain.{name}" for name in ("num_steps=1", "eval_every=1", "sample_length=1")]
    for _ in range(number):
        tree: dict[str, Any] = yaml.safe_load(RECIPE)
        told, content = "", b""
        for _ in range(rng.choice((1, 1, 2, 3))):
            change = rng.choice(changes)
            what, made = change(rng, tree, content or dump(tree))
            told = f"{told}, {what}" if told else what
            if made is not None:
                content = made
            elif content:
                break  # a tree that is text by now
        words = ["plan", "recipe.yaml", "--run-dir", "run"]
        content = content or dump(tree)
        small = not any(str(value).encode() in content for value in HUGE) and b"00000" not in content
        if small and rng.random() < run_share:
            words = ["run", "recipe.yaml", *one_step, "--to", "pretrain", "--run-dir", "run"]
        yield Case(told, "recipe.yaml", content, words, small)


def dump(tree: Any) -> bytes:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            yield from _places(value, (*path, key))
    elif isinstance(tree, list):
        for place, value in enumerate(tree):
            yield (*path, place)
            yield from _places(value, (*path, place))


def _somewhere(rng: random.Random, tree: Any) -> tuple[Any, Any, str]:
    """A container, a key in it, and the name of the place."""
    found = list(_places(tree))
    if not found:
        tree["sft"] = 1
        found = [("sft",)]
    path = rng.choice(found)
    container = tree
    for key in path[:-1]:
        container = container[key]
    return container, path[-1], ".".join(map(str, path))


Made = tuple[str, bytes | None]


def _set_value(rng: random.Random, tree: Any, _content: bytes) -> Made:
    container, key, name = _somewhere(rng, tree)
    container[key] = value = copy.deepcopy(rng.choice(VALUES))
    return f"{name} = {str(value)[:40]!r}", None


def _drop(rng: random.Random, tree: Any, _content: bytes) -> Made:
    container, key, name = _somewhere(rng, tree)
    del container[key]
    return f"no {name}", None


def _rename(rng: random.Random, tree: Any, _content: bytes) -> Made:
    container, key, name = _somewhere(rng, tree)
    if isinstance(container, dict):
        new = rng.choice([*WORDS, f"{key}x", str(key)[:-1], str(key).upper(), rng.choice((1, None, True, 1.5))])
        container[new] = container.pop(key)
        return f"{name} is called {new!r}", None
    return _drop(rng, tree, _content)


def _move(rng: random.Random, tree: Any, _content: bytes) -> Made:
    container, key, name = _somewhere(rng, tree)
    value = container[key] if isinstance(container, list) else container.pop(key)
    other, place, there = _somewhere(rng, tree)
    other[place] = value
    return f"{name} at {there}", None


def _add(rng: random.Random, tree: Any, _content: bytes) -> Made:
    container, _, name = _somewhere(rng, tree)
    if isinstance(container, dict):
        new, value = rng.choice(WORDS), copy.deepcopy(rng.choice(VALUES))
        container[new] = value
        return f"{new!r} = {str(value)[:40]!r} beside {name}", None
    container.append(copy.deepcopy(rng.choice(VALUES)))
    return f"one more at {name}", None


def _nest(rng: random.Random, tree: Any, _content: bytes) -> Made:
    container, key, name = _somewhere(rng, tree)
    depth = rng.choice((1, 2, 50))
    for _ in range(depth):
        container[key] = rng.choice(([container[key]], {"a": container[key]}))
    return f"{name} {depth} deep", None


def _cut(rng: random.Random, _tree: Any, content: bytes) -> Made:
    place = rng.randrange(len(content) + 1)
    return f"cut at byte {place}", content[:place] or b"\n"


def _bytes(rng: random.Random, _tree: Any, content: bytes) -> Made:
    place = rng.randrange(len(content) + 1)
    junk = rng.choice((
        b"\t", b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b":", b"- ", b"{", b"[", b"'", b'"', b"&a ",
        b"*a ", b"!!x ", b"#", b"\r", b"\x85", "\u2028".encode(), b"%", b"@", b"|", b"\n---\n", b"\n...\n", b"${",
        b"\x07",
    ))  # fmt: skip
    if rng.random() < 0.1:
        how, made = rng.choice((
            ("UTF-16", content.decode("utf-8", "replace").encode("utf-16")), ("BOM", b"\xef\xbb\xbf" + content),
            ("CRLF", content.replace(b"\n", b"\r\n")), ("CR", content.replace(b"\n", b"\r")),
            ("tabs", content.replace(b"  ", b"\t")), ("random bytes", rng.randbytes(300)),
        ))  # fmt: skip
        return how, made
    return f"{junk!r} at byte {place}", content[:place] + junk + content[place:]


def _lines(rng: random.Random, _tree: Any, content: bytes) -> Made:
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    what = rng.choice(("twice", "gone", "further in", "further out", "elsewhere"))
    if what == "twice":
        lines.insert(place, lines[place])
    elif what == "further in":
        lines[place] = b" " * rng.randint(1, 3) + lines[place]
    elif what == "further out":
        lines[place] = lines[place].removeprefix(b" ")
    else:
        line = lines.pop(place)
        if what == "elsewhere":
            lines.insert(rng.randrange(len(lines) + 1), line)
    return f"line {place + 1} {what}", b"\n".join(lines) or b"\n"


def _whole(rng: random.Random, _tree: Any, content: bytes) -> Made:
    if rng.random() < 0.1:
        return "no recipe but an oddity", rng.choice(sorted(ODDITIES))
    text = rng.choice(TEXTS)
    if rng.random() < 0.5:
        return f"{text[:30]!r} alone", text or b"\n"
    return f"{text[:30]!r} added", content + b"\n" + text
