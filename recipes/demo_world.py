"""The world of the demo: short stories about a hero and a thing, and a judge that can tell good from bad.

    prompt    Write about a fox and a kite.
    good      The brave fox found a red kite by the river. The fox was very proud.
    bad       The brave fox found a red boat by the river. The fox was very proud.

`documents`, `demonstrations`, `rankings` and `prompts` are data sources (`rlhf.recipes.demo_world:prompts`):
each returns rows, the same ones for the same options. Demonstrations are of mixed quality, as people's are:
a fifth is good, so a model that imitates them has much to gain from PPO. `judge` knows the true quality.
"""

import re
from collections.abc import Iterator
from random import Random
from typing import Any

# fmt: off
HEROES = (
    "baker", "bear", "bird", "cat", "child", "cow", "crab", "dog", "duck", "farmer", "fox", "frog", "goat",
    "horse", "king", "lion", "mouse", "pig", "queen", "robot", "sailor", "teacher", "tiger", "wizard", "wolf",
)
THINGS = (
    "bell", "boat", "book", "bridge", "cake", "car", "chair", "drum", "flag", "hat",
    "house", "kite", "lamp", "map", "ring", "rope", "stone", "tree", "wall", "wheel",
)
# fmt: on
WORDS = {  # none starts with a vowel: "a" is always right
    "hero": HEROES,
    "thing": THINGS,
    "kind": ("brave", "clever", "gentle", "little", "quiet", "young"),
    "look": ("big", "blue", "green", "new", "red", "small"),
    "did": ("drew", "found", "liked", "painted", "saw", "wanted"),
    "rested": ("danced", "sang", "slept", "waited"),
    "mood": ("glad", "happy", "proud", "tired"),
    "where": ("after lunch", "at night", "by the river", "by the sea", "in the forest", "in the rain"),
}

# A story is one opening and up to MAX_MORE different sentences more. Only these count as sentences.
OPENINGS = (
    "The {kind} {hero} {did} a {look} {thing}.",
    "The {kind} {hero} {did} a {look} {thing} {where}.",
    "One day the {kind} {hero} {did} a {look} {thing}.",
)
MORE = (
    "The {hero} was very {mood}.",
    "The {hero} {rested} {where}.",
    "The {thing} was very {look}.",
)
TITLES = (  # they open a document; as an answer they say nothing
    "A {hero} and a {thing}.",
    "A {thing} and a {hero}.",
    "A story about a {hero} and a {thing}.",
    "A story about a {thing} and a {hero}.",
)
MAX_MORE = 2

REQUESTS = (
    "Write about a {hero} and a {thing}.",
    "Tell me about a {thing} and a {hero}.",
    "Please write a story about a {hero} and a {thing}.",
    "Can you tell a story about a {thing} and a {hero}?",
)

# How often each kind of answer is written: as a demonstration, and as one of a ranking's answers.
KINDS = {
    "good": (0.19, 0.26),
    "strays": (0.05, 0.10),
    "wrong thing": (0.15, 0.18),
    "wrong hero": (0.15, 0.18),
    "repeats": (0.12, 0.07),
    "off topic": (0.22, 0.10),
    "keywords": (0.12, 0.05),
    "broken": (0.00, 0.06),
}


def documents(num: int = 4000, seed: int = 0) -> Iterator[str]:
    """Raw text: a title, then a story about what it names, which teaches grammar and looking back."""
    rng = Random(f"documents {seed}")
    for _ in range(num):
        hero, thing = rng.choice(HEROES), rng.choice(THINGS)
        title = _fill(rng, rng.choice(TITLES), hero, thing)
        yield f"{title} {_story(rng, hero, thing, num_more=rng.randint(1, 2))}"


def demonstrations(num: int = 4000, seed: int = 0) -> Iterator[dict[str, str]]:
    """Prompts with one answer each, good or not."""
    rng = Random(f"demonstrations {seed}")
    weights = [demonstrated for demonstrated, _ in KINDS.values()]
    for hero, thing in _pairs(rng, num):
        kind = rng.choices(list(KINDS), weights)[0]
        yield {"prompt": _request(hero, thing), "response": _answer(rng, kind, hero, thing)}


def rankings(num: int = 2000, answers: int = 4, noise: float = 0.05, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Prompts with answers of different kinds, ranked from 1 by a judge who grades a share `noise` blindly."""
    if not 2 <= answers <= len(KINDS):
        raise ValueError(f"answers is {answers}; a ranking has 2 to {len(KINDS)}, one of a kind")
    rng = Random(f"rankings {seed}")
    for hero, thing in _pairs(rng, num):
        ranks = [1]
        while len(set(ranks)) == 1:  # nothing to learn from answers that are all as good
            # the first to arrive, each kind at its own rate: drawn by weight, none twice
            kinds = sorted(KINDS, key=lambda kind: rng.expovariate(KINDS[kind][1]))[:answers]
            rng.shuffle(kinds)
            wording = rng.getrandbits(32)  # the same for all: answers differ in what makes them better or worse
            responses = [_answer(Random(wording), kind, hero, thing) for kind in kinds]
            grades = [rng.random() if rng.random() < noise else _quality(r, hero, thing) for r in responses]
            ranks = [1 + sum(other > grade for other in grades) for grade in grades]
        yield {"prompt": _request(hero, thing), "responses": responses, "ranks": ranks}


def prompts(seed: int = 0) -> Iterator[dict[str, str]]:
    """Every pair of a hero and a thing once, 500 in all, shuffled."""
    for hero, thing in _pairs(Random(f"prompts {seed}"), len(HEROES) * len(THINGS)):
        yield {"prompt": _request(hero, thing)}


def judge(prompts: list[str], responses: list[str]) -> list[float]:
    """True quality from 0 to 1 of each response to its prompt.

    1 for a well-formed story about the hero and the thing and nobody else, .3 less for each stray one; .4 at
    most if one of the two is missing; .1 off topic, or if it does not open like a story, repeats itself or
    rambles on; 0 if any part of it is not a sentence of this world.
    Raises ValueError for a prompt of another world.
    """
    return [_quality(response, *_asked(prompt)) for prompt, response in zip(prompts, responses, strict=True)]


def _quality(response: str, hero: str, thing: str) -> float:
    sentences = re.split(r"(?<=\.) ", response.strip())
    opens = [bool(_OPENING.fullmatch(sentence)) for sentence in sentences]
    if not all(is_opening or _MORE.fullmatch(s) for s, is_opening in zip(sentences, opens, strict=True)):
        return 0.0
    more = sentences[1:]
    told_once = opens[0] and not any(opens[1:]) and len(set(more)) == len(more) <= MAX_MORE
    named = _named(response)
    missing, strays = len({hero, thing} - named), len(named - {hero, thing})
    if not told_once or missing == 2:
        return 0.1
    if missing == 1:
        return round(0.4 - 0.1 * (strays - 1), 1)  # one stray stands in for what is missing
    return round(1.0 - 0.3 * strays, 1)


def _answer(rng: Random, kind: str, hero: str, thing: str) -> str:
    """An answer of some kind; each kind comes short and long, so that length says little."""
    other_hero = rng.choice([word for word in HEROES if word != hero])
    other_thing = rng.choice([word for word in THINGS if word != thing])
    match kind:
        case "good":
            return _story(rng, hero, thing)
        case "wrong thing":
            return _story(rng, hero, other_thing)
        case "wrong hero":
            return _story(rng, other_hero, thing)
        case "off topic":
            return _story(rng, other_hero, other_thing)
        case "strays":  # starts well, then turns to somebody or something else
            more = _fill(rng, rng.choice(MORE), other_hero, other_thing)
            return f"{_story(rng, hero, thing, num_more=0)} {more}"
        case "repeats":
            sentence = _fill(rng, OPENINGS[0], hero, thing)
            return f"{sentence} {sentence}"
        case "keywords":
            return " ".join(_fill(rng, title, hero, thing) for title in rng.sample(TITLES, rng.randint(1, 3)))
        case "broken":  # a word is missing or comes twice
            words = _story(rng, hero, thing).split(" ")
            place = rng.randrange(1, 4)
            words[place : place + 1] = rng.choice([[], [words[place]] * 2])
            return " ".join(words)
    raise ValueError(f"no kind of answer is called {kind!r}")


def _story(rng: Random, hero: str, thing: str, num_more: int | None = None) -> str:
    if num_more is None:
        num_more = rng.choices((0, 1, 2), weights=(4, 5, 1))[0]
    templates = [rng.choice(OPENINGS), *rng.sample(MORE, num_more)]
    return " ".join(_fill(rng, template, hero, thing) for template in templates)


def _fill(rng: Random, template: str, hero: str, thing: str) -> str:
    words = {field: rng.choice(choices) for field, choices in WORDS.items() if field in template}
    return template.format(**{**words, "hero": hero, "thing": thing})


def _pairs(rng: Random, num: int) -> Iterator[tuple[str, str]]:
    """`num` pairs of a hero and a thing; none comes again before all have come."""
    every = [(hero, thing) for hero in HEROES for thing in THINGS]
    for start in range(0, num, len(every)):
        yield from rng.sample(every, min(len(every), num - start))


def _request(hero: str, thing: str) -> str:
    """One phrasing for each pair, whatever the seed: prompts held out are pairs held out."""
    return REQUESTS[(HEROES.index(hero) + THINGS.index(thing)) % len(REQUESTS)].format(hero=hero, thing=thing)


def _asked(prompt: str) -> tuple[str, str]:
    heroes, things = _named(prompt) & set(HEROES), _named(prompt) & set(THINGS)
    if len(heroes) != 1 or len(things) != 1:
        raise ValueError(
            f"the demo's judge found {prompt!r}; it knows only prompts that name one hero and one thing "
            f"of the demo world, such as {_request('fox', 'kite')!r}"
        )
    return heroes.pop(), things.pop()


def _named(text: str) -> set[str]:
    return set(re.findall("[a-z]+", text)) & {*HEROES, *THINGS}


def _parser(templates: tuple[str, ...]) -> re.Pattern[str]:
    any_word = {field: f"(?:{'|'.join(choices)})" for field, choices in WORDS.items()}
    return re.compile("|".join(template.replace(".", r"\.").format(**any_word) for template in templates))


_OPENING, _MORE = _parser(OPENINGS), _parser(MORE)
