"""Generated tasks with checkable answers: what baton-tiny is trained on, tested with and shown with.

Everything here is a function of a `random.Random` and nothing else, in the standard library alone, so training,
evaluation, the tests, the benchmark and the demo all draw from the same source. A task function returns a `Sample`:
the chat messages (or the plain text to be continued), the expected answer, and `Sample.check` for a given answer.

Held-out data is split by content, not only by seed: a fact, a sum or a list belongs to the split that the CRC-32 of
its text says (one in sixteen is held out), so a held-out sample cannot have been seen in training.

    sample = recall(random.Random(7), "heldout", num_tokens=1500)
    sample.messages      # what to send to the chat endpoint
    sample.check(reply)  # whether the reply is right
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeVar

Message = dict[str, str]
Split = Literal["train", "heldout"]
CheckKind = Literal["exact", "json", "story"]
T = TypeVar("T")

# The pre-tokeniser's rule, in the part of it that Python's `re` has too (the same cuts on ASCII text): one digit, a
# word with the space before it, a run of punctuation with the space before it, white space.
PIECE = re.compile(r"[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")

HELDOUT_ONE_IN = 16


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split("|")]


NAMES = _words("""
    Adam Agnes Alan Albert Alice Amber Amir Anders Andrea Anna Anton Arthur Astrid Aysha Basil Beatrix Bella Ben Bertha
    Bianca Boris Brenda Bruno Carl Carmen Cecil Chiara Clara Conrad Cora Cyril Dagmar Daisy Daniel Dara Diana Dmitri
    Dora Edgar Edith Eduardo Elena Elias Ella Elsa Emil Emma Enzo Erik Esther Eva Farid Felix Fiona Flora Frank Frida
    Gemma George Gerda Gino Gloria Greta Gustav Hanna Harold Hassan Hector Heidi Helen Henry Hilda Hugo Ida Igor Ilse
    Ines Iris Isaac Ivan Ivy Jack Jade Jana Jasper Joan Joel John Jonas Judith Julia Karin Karl Kate Keiko Kurt Lara
    Laura Lea Leo Lena Liam Lilian Linda Lorenzo Louis Lucas Lucy Luna Magda Marco Maria Marta Martin Max Maya Mila Mina
    Monica Nadia Nathan Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Paula Pedro Petra Philip Pia Quinn Ralf Rania
    Rita Robert Rosa Ruth Sam Sandra Sara Silvia Simon Sofia Stella Sven Tara Theo Thomas Tina Tom Ulla Uma Vera Victor
    Viola Walter Wanda Wendy Xenia Yara Yusuf Zara Zoe
""")
CITIES = _words("""
    Rome Paris Berlin Madrid Lisbon Vienna Prague Warsaw Dublin Oslo Helsinki Stockholm Copenhagen Amsterdam Brussels
    Zurich Geneva Milan Venice Naples Athens Istanbul Cairo Tunis Nairobi Lagos Accra Dakar Tokyo Osaka Kyoto Seoul
    Beijing Hanoi Bangkok Delhi Mumbai Sydney Perth Auckland Toronto Montreal Boston Chicago Denver Seattle Austin
    Havana Lima Quito Bogota Santiago Krakow Porto Seville Lyon Hamburg Munich Cologne Leipzig
""")
COLOURS = _words("""
    red blue green yellow orange purple pink brown black white grey golden silver violet turquoise crimson
""")
THINGS = _words("""
    box lamp chair table clock vase cup plate bowl basket bottle book bag ball carpet curtain cushion door drawer
    umbrella mirror piano radio suitcase teapot towel blanket candle ladder bucket kettle jacket hat scarf bicycle boat
    kite drum guitar painting
""")
PLACES = _words("""
    kitchen garden cellar attic garage bedroom bathroom hallway library office workshop shed barn tower school station
    museum bakery market hotel harbour chapel theatre studio pantry greenhouse stable castle cabin village
""")
ANIMALS = _words("""
    fox cat dog horse rabbit bear wolf owl mouse duck goose hen frog turtle hedgehog squirrel deer goat sheep cow donkey
    otter beaver badger swan crow robin sparrow lion tiger elephant monkey penguin whale dolphin seal bee snail camel
    parrot
""")
FOODS = _words("""
    bread cheese soup rice pasta pizza salad honey butter cake pie pancakes porridge beans carrots potatoes tomatoes
    mushrooms onions spinach apples pears cherries grapes melons plums peaches lemons oranges strawberries nuts
    chocolate yoghurt noodles dumplings omelette sausages fish lentils pumpkin
""")
JOBS = _words("""
    baker teacher doctor nurse farmer painter singer dancer writer lawyer pilot sailor driver gardener carpenter plumber
    tailor butcher barber cook waiter librarian engineer architect chemist dentist judge miner printer weaver
""")
ADJECTIVES = _words("""
    old young small big little tall short quiet loud happy sad brave shy clever kind gentle curious tired hungry proud
    calm busy lazy honest lonely cheerful careful strange bright dark warm cold heavy light soft hard clean dusty empty
    full round narrow wide pretty plain fresh famous simple secret wooden broken
""")
WORDS = _words("""
    apple river stone cloud forest mountain window bridge flower silver summer winter spring autumn morning evening
    shadow thunder island ocean desert meadow valley orchard pebble feather button needle hammer pencil ribbon marble
    copper cotton velvet pepper ginger maple willow cedar lantern compass anchor barrel wagon tunnel puzzle rocket
    planet comet magnet engine wheel paper letter number circle square corner ladder basket candle mirror blanket pocket
    finger shoulder garden kitchen village castle market harbour station music story dream
""")
WHEN = _phrases("""
    today | yesterday | again | later | sometimes | at night | in the morning | in the evening | in the afternoon |
    after lunch | before breakfast | on Monday | on Tuesday | on Wednesday | on Thursday | on Friday | on Saturday |
    on Sunday | in winter | in spring | in summer | in autumn | every day | once a week | for an hour | all day long
""")
OPENERS = [when[0].upper() + when[1:] for when in WHEN]
VERBS_PAST = _words("""
    cleaned painted moved carried dropped found lost bought sold borrowed repaired opened closed admired noticed forgot
    washed polished hid showed wanted needed liked measured weighed
""")
MOTIONS = _words("""
    walked ran went drove travelled hurried returned cycled wandered strolled
""")
SPEECH = _words("""
    said thought believed heard hoped knew wrote remembered explained whispered
""")
WEATHER = _words("""
    sunny rainy cloudy windy foggy snowy stormy warm cold mild dry wet
""")
ADVERBS = _words("""
    slowly quickly quietly carefully happily sadly bravely gently loudly often never always
""")

# Only in the tokeniser's corpus, so that everyday English costs about one token a word.
COMMON = _words("""
    the of and to in is you that it he was for on are as with his they I at be this have from or one had by word but not
    what all were we when your can there use an each which she do how their if will up other about out many then them
    these so some her would make like him into time has look two more write go see number no way could people my than
    first water been call who oil its now find long down day did get come made may part over new sound take only little
    work know place year live me back give most very after thing our just name good sentence man think say great where
    help through much before line right too mean any same tell boy follow came want show also around form three small
    set put end does another well large must big even such because turn here why ask went men read need land different
    home us move try hand picture change off play spell air away house point page letter mother answer found study still
    learn should world high every near add food between own below country plant last school father keep tree never start
    city earth eye light thought head under story saw left few while along might close something seem next hard open
    example begin life always those both paper together got group often run important until children side feet car mile
    night walk white sea began grow took river four carry state once book hear stop without second later miss idea
    enough eat face watch far really almost let above girl sometimes mountain cut young talk soon list song being leave
    family body music colour server request token model prefill decode cache block router network memory system user
    assistant hello world thanks please yes remember question text object keys order alphabetical backwards reverse
    repeat count smallest largest json value null true false error message system data stream chat test code function
    return class import print
""")


@dataclass(frozen=True)
class Sample:
    """One prompt and what a right answer to it is.

    A chat sample ends with a user message; a plain one is text for the completions endpoint, and its answer starts
    with the space that joins it to the prompt.
    """

    task: str
    prompt: str
    answer: str
    kind: CheckKind = "exact"
    history: tuple[Message, ...] = ()  # the messages before the last one
    mentions: tuple[str, ...] = ()  # what a story must mention
    plain: bool = False

    @property
    def messages(self) -> list[Message]:
        """The chat messages to send: the history, then the prompt as the user's turn."""
        if self.plain:
            raise ValueError(f"{self.task} is a plain completion: send .prompt")
        return [*self.history, {"role": "user", "content": self.prompt}]

    def check(self, text: str) -> bool:
        """Whether `text`, a reply without special tokens, is a right answer."""
        if self.kind == "json":
            return _same_json(text, self.answer)
        if self.kind == "story":
            return _good_story(text, self.mentions)
        return text.strip() == self.answer.strip()


def _same_json(text: str, expected: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(expected))
    except ValueError:
        return False


def _good_story(text: str, mentions: Sequence[str]) -> bool:
    """At least 25 words in whole sentences, every wanted word among them, and no sentence twice."""
    text = text.strip()
    sentences = [part.strip() for part in re.split(r"[.!?]", text) if part.strip()]
    whole = text[-1:] in {".", "!", "?"} and len(text.split()) >= 25
    return whole and len(sentences) == len(set(sentences)) and all(word in text for word in mentions)


def in_split(key: str, split: Split) -> bool:
    """Whether content that reads `key` belongs to `split`."""
    return (zlib.crc32(key.encode()) % HELDOUT_ONE_IN == 0) == (split == "heldout")


def _draw(make: Callable[[], T], key: Callable[[T], str], split: Split) -> T:
    """Draw until the drawn content belongs to `split` (16 draws on average for held-out content).

    Raises ValueError where there is no such content, as for a range so narrow that none of it is held out.
    """
    for _ in range(10_000):
        drawn = make()
        if in_split(key(drawn), split):
            return drawn
    raise ValueError(f"no {split} content in 10,000 draws, the last of them {key(drawn)!r}")


def estimate_tokens(text: str) -> int:
    """The number of tokens of `text` to within a few per cent: nearly every word of the grammar is one token."""
    return len(PIECE.findall(text))


def _pick(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]  # three times as fast as rng.choice, and this is most of the work


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def invented_name(rng: Random) -> str:
    """A name that no list holds, such as Velkora: several tokens long."""
    syllables = "ba be da dor el fa fin gar hel in ka kor la len ma mi nor or pa ra rin sa sol ta tor ul va vel zan zi"
    return "".join(_pick(rng, syllables.split()) for _ in range(rng.randint(2, 4))).capitalize()


def _name(rng: Random) -> str:
    return _pick(rng, NAMES) if rng.random() < 0.9 else invented_name(rng)


def filler_sentence(rng: Random) -> str:
    """One sentence that states nothing a question is asked about, though it uses the same names and things."""
    p, kind = _pick, int(rng.random() * 14)
    if kind == 0:
        return f"{p(rng, NAMES)} {p(rng, VERBS_PAST)} the {p(rng, ADJECTIVES)} {p(rng, THINGS)} {p(rng, WHEN)}."
    if kind == 1:
        animal = f"{p(rng, ADJECTIVES)} {p(rng, ANIMALS)}"
        return f"The {animal} {p(rng, MOTIONS)} {p(rng, ADVERBS)} to the {p(rng, PLACES)}."
    if kind == 2:
        return f"It was {p(rng, WEATHER)} in {p(rng, CITIES)} {p(rng, WHEN)}."
    if kind == 3:
        return f"{p(rng, NAMES)} {p(rng, SPEECH)} that the {p(rng, PLACES)} was too {p(rng, ADJECTIVES)}."
    if kind == 4:
        return f"There was {_article(p(rng, ADJECTIVES))} {p(rng, THINGS)} near the {p(rng, PLACES)}."
    if kind == 5:
        return f"{p(rng, NAMES)} and {p(rng, NAMES)} {p(rng, MOTIONS)} from {p(rng, CITIES)} to {p(rng, CITIES)}."
    if kind == 6:
        return f"{p(rng, OPENERS)}, {p(rng, NAMES)} ate {p(rng, FOODS)} with {p(rng, FOODS)}."
    if kind == 7:
        return f"The {p(rng, JOBS)} {p(rng, VERBS_PAST)} {_article(p(rng, COLOURS))} {p(rng, THINGS)}."
    if kind == 8:
        return f"Nobody {p(rng, SPEECH)} why the {p(rng, ANIMALS)} was so {p(rng, ADJECTIVES)}."
    if kind == 9:
        return f"{p(rng, NAMES)} {p(rng, ADVERBS)} {p(rng, VERBS_PAST)} {rng.randint(2, 99)} {p(rng, WORDS)} cards."
    if kind == 10:
        return f"A {p(rng, JOBS)} from {p(rng, CITIES)} {p(rng, MOTIONS)} past the {p(rng, PLACES)} {p(rng, WHEN)}."
    if kind == 11:
        return f"The {p(rng, FOODS)} in the {p(rng, PLACES)} smelled {p(rng, ADJECTIVES)} and {p(rng, ADJECTIVES)}."
    if kind == 12:
        return f"{p(rng, NAMES)} met {p(rng, NAMES)} at the {p(rng, PLACES)} in {p(rng, CITIES)}."
    return f"Then the {p(rng, ANIMALS)} saw the {p(rng, WORDS)} and the {p(rng, WORDS)} by the {p(rng, PLACES)}."


def filler(rng: Random, num_tokens: int) -> list[str]:
    """Filler sentences of about `num_tokens` tokens in all."""
    sentences, count = [], 0
    while count < num_tokens:
        sentence = filler_sentence(rng)
        count += sentence.count(" ") + 2  # the words, and the full stop
        sentences.append(sentence)
    return sentences


@dataclass(frozen=True)
class Fact:
    """Something stated once: `statement` is `stem` + " " + `value` + ".", and it answers `question`."""

    question: str
    stem: str
    value: str

    @property
    def statement(self) -> str:
        return f"{self.stem} {self.value}."


def _digits(rng: Random, count: int) -> str:
    return str(rng.randrange(10 ** (count - 1), 10**count))


def _of(subject: str, value: str) -> Fact:
    return Fact(f"What is the {subject}?", f"The {subject} is", value)


def _any_fact(rng: Random) -> Fact:
    kind = int(rng.random() * 10)
    if kind <= 2:
        return _of(f"secret code of {_name(rng)}", _digits(rng, 4))
    if kind == 3:
        return _of(f"phone number of {_name(rng)}", _digits(rng, 6))
    if kind == 4:
        return _of(f"colour of the {_pick(rng, THINGS)} in the {_pick(rng, PLACES)}", _pick(rng, COLOURS))
    if kind == 5:
        name = _name(rng)
        return Fact(f"Where does {name} live?", f"{name} lives in", _pick(rng, CITIES))
    if kind == 6:
        return _of(f"favourite food of {_name(rng)}", _pick(rng, FOODS))
    if kind == 7:
        return _of(f"password of the {_pick(rng, PLACES)}", f"{_pick(rng, WORDS)}{_digits(rng, 3)}")
    if kind == 8:
        return _of(f"age of {_name(rng)}", str(rng.randint(1, 99)))
    thing = _pick(rng, THINGS)
    return Fact(f"Where is the key to the {thing}?", f"The key to the {thing} is in the", _pick(rng, PLACES))


def fact(rng: Random, split: Split = "train") -> Fact:
    """One fact of any kind: a code, a phone number, a colour, a home, a food, a password, an age, a hiding place."""
    return _draw(lambda: _any_fact(rng), lambda drawn: drawn.statement, split)


def secret_code(rng: Random, split: Split = "train", name: str = "") -> Fact:
    """A fact of the kind "The secret code of Anna is 4821."."""
    who = name or _name(rng)
    code = _draw(lambda: _digits(rng, 4), lambda drawn: f"The secret code of {who} is {drawn}.", split)
    return _of(f"secret code of {who}", code)


def facts(rng: Random, count: int, split: Split = "train") -> list[Fact]:
    """`count` facts whose questions all differ."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        new = fact(rng, split)
        found.setdefault(new.question, new)
    return list(found.values())


def new_facts(rng: Random, known: Sequence[Fact], split: Split = "train") -> list[Fact]:
    """Up to three facts, none about what a fact of `known` is about."""
    return [item for item in facts(rng, rng.randint(1, 3), split) if all(item.stem != old.stem for old in known)]


def passage(rng: Random, stated: Sequence[Fact], num_tokens: int) -> str:
    """A text of about `num_tokens` tokens that states every fact of `stated` once, each at a random place."""
    room = num_tokens - sum(estimate_tokens(item.statement) for item in stated)
    sentences = filler(rng, max(int(room * 0.95), 0))  # 5 %: numbers and breaks, which `filler` does not count
    for item in stated:
        sentences.insert(int(rng.random() * (len(sentences) + 1)), item.statement)
    size = rng.randint(4, 12)
    return "\n\n".join(" ".join(sentences[i : i + size]) for i in range(0, len(sentences), size))


def ask(rng: Random, text: str, question: str) -> str:
    """A user's message that holds `text` and asks `question` about it."""
    lead = _pick(rng, ("Read the text and answer the question.", "Here is a text.", "Text:", ""))
    return f"{lead}\n\n{text}\n\n{question}".strip()


def num_facts_for(rng: Random, num_tokens: int) -> int:
    """How many facts to state in a text of `num_tokens` tokens: one to about one in 100 tokens."""
    return rng.randint(1, max(2, min(24, num_tokens // 100)))


def recall(
    rng: Random, split: Split = "train", num_tokens: int = 200, num_facts: int = 0, plain: bool = False
) -> Sample:
    """Recall of one fact stated somewhere in a prompt of about `num_tokens` tokens, among distractor facts.

    `num_facts` counts the asked fact too; 0 draws it. The fact's place in the text is uniform.
    """
    stated = facts(rng, num_facts or num_facts_for(rng, num_tokens), split)
    asked = _pick(rng, stated)
    text = passage(rng, stated, num_tokens - 32)  # 32: the lead, the question and the template around them
    if plain:
        return Sample("recall_plain", f"{text}\n\n{asked.stem}", f" {asked.value}.", plain=True)
    return Sample("recall", ask(rng, text, asked.question), asked.statement)


def chat_recall(rng: Random, split: Split = "train", num_turns: int = 4) -> Sample:
    """Recall of a fact told in an earlier turn of the chat, with other tasks asked in the turns between."""
    stated = facts(rng, rng.randint(1, 3), split)
    history = tell(rng, stated)
    for _ in range(num_turns):
        history += exchange(short_task(rng, split))
    asked = _pick(rng, stated)
    return Sample("chat_recall", asked.question, asked.statement, history=tuple(history))


def tell(rng: Random, stated: Sequence[Fact]) -> list[Message]:
    """The turn in which the user tells facts, and the assistant's acknowledgement."""
    lead = _pick(rng, ("Please remember: ", "Remember this. ", "Note: ", ""))
    content = lead + " ".join(item.statement for item in stated)
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "I will remember that."}]


def exchange(sample: Sample) -> list[Message]:
    """A sample's last user message and its answer, as two messages."""
    return [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.answer}]


def sums(rng: Random, split: Split = "train", plain: bool = False) -> Sample:
    """The sum of two numbers of up to two digits: "What is 12 + 7?" is answered by "12 + 7 = 19"."""
    a, b = _draw(lambda: _terms(rng), _sum_key, split)
    if plain:
        return Sample("sums_plain", f"{a} + {b} =", f" {a + b}", plain=True)
    prompt = _pick(rng, (f"What is {a} + {b}?", f"Add {a} and {b}.", f"{a} + {b} = ?"))
    return Sample("sums", prompt, f"{a} + {b} = {a + b}")


def _terms(rng: Random) -> tuple[int, int]:
    top = 100 if rng.random() < 0.8 else 10
    return int(rng.random() * top), int(rng.random() * 100)


def _sum_key(terms: tuple[int, int]) -> str:
    return f"{min(terms)}+{max(terms)}"


def sums3(rng: Random, split: Split = "train") -> Sample:
    """The sum of three numbers up to 49, answered in two steps."""
    a, b, c = _draw(lambda: _three_terms(rng), lambda drawn: "{}+{}+{}".format(*sorted(drawn)), split)
    answer = f"{a} + {b} = {a + b} and {a + b} + {c} = {a + b + c}"
    return Sample("sums3", f"What is {a} + {b} + {c}?", answer)


def _three_terms(rng: Random) -> tuple[int, int, int]:
    """Three terms whose two partial sums are both training sums, so that `sums` keeps its held-out pairs."""
    while True:
        a, b, c = (int(rng.random() * 50) for _ in range(3))
        if in_split(_sum_key((a, b)), "train") and in_split(_sum_key((a + b, c)), "train"):
            return a, b, c


def sort_numbers(rng: Random, split: Split = "train") -> Sample:
    """Three to eight different numbers up to 99, to be sorted up or down."""
    numbers = _draw(lambda: rng.sample(range(100), rng.randint(3, 8)), str, split)
    down = rng.random() < 0.3
    order = "largest to smallest" if down else "smallest to largest"
    prompt = f"Sort these numbers from {order}: {_commas(numbers)}"
    return Sample("sort_numbers", prompt, _commas(sorted(numbers, reverse=down)))


def sort_words(rng: Random, split: Split = "train") -> Sample:
    """Three to six different words, to be put into alphabetical order."""
    words = _draw(lambda: rng.sample(WORDS, rng.randint(3, 6)), str, split)
    return Sample("sort_words", f"Sort these words alphabetically: {_commas(words)}", _commas(sorted(words)))


def _commas(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


REVERSIBLE = (
    (WORDS, "these words", " "),
    (WORDS, "this list", ", "),
    (list("abcdefghijklmnopqrstuvwxyz"), "these letters", " "),
)


def reverse(rng: Random, split: Split = "train") -> Sample:
    """Three to ten words or letters, to be written in reverse order."""
    pool, what, joint = _pick(rng, REVERSIBLE)
    items = _draw(lambda: [_pick(rng, pool) for _ in range(rng.randint(3, 10))], str, split)
    return Sample("reverse", f"Reverse {what}: {joint.join(items)}", joint.join(reversed(items)))


def repeat(rng: Random, split: Split = "train") -> Sample:
    """Words and numbers to be repeated as they are."""
    items = _draw(lambda: [_word_or_number(rng) for _ in range(rng.randint(3, 20))], str, split)
    text = " ".join(items)
    return Sample("repeat", f"Repeat after me: {text}", text)


def _word_or_number(rng: Random) -> str:
    return _pick(rng, WORDS) if rng.random() < 0.7 else str(int(rng.random() * 1000))


def count_items(rng: Random, split: Split = "train") -> Sample:
    """How many times a word stands in a list of up to ten words; the answer is 0 to 5."""
    items = _draw(lambda: _list_with_repeats(rng), str, split)
    word = items[0]
    rest = items[1:]
    prompt = f"How many times does {word} appear in this list: {_commas(rest)}"
    number = rest.count(word)
    return Sample("count_items", prompt, f"{word} appears {number} {'time' if number == 1 else 'times'}.")


def _list_with_repeats(rng: Random) -> list[str]:
    """The word to count, then the list."""
    words = rng.sample(WORDS, rng.randint(2, 5))
    number = rng.randint(0, 5)
    rest = [words[0]] * number + [_pick(rng, words[1:]) for _ in range(rng.randint(1, 10 - number))]
    rng.shuffle(rest)
    return [words[0], *rest]


def count_up(rng: Random, split: Split = "train", span: int = 0) -> Sample:
    """Counting up or down between two numbers up to 150: a long answer.

    `span` fixes the number of steps, and then counts up from anywhere: some spans have no held-out range at all.
    """
    low, steps = (
        (rng.randint(0, 150 - span), span)
        if span
        else _draw(lambda: _count_range(rng), lambda drawn: f"count {drawn[0]} {drawn[1]}", split)
    )
    numbers = list(range(low, low + steps + 1))
    if not span and rng.random() < 0.25:
        return Sample("count_down", f"Count down from {numbers[-1]} to {low}.", _commas(numbers[::-1]))
    return Sample("count_up", f"Count from {low} to {numbers[-1]}.", _commas(numbers))


def _count_range(rng: Random) -> tuple[int, int]:
    """Where to count from, and over how many steps: 1 to 99, most often few."""
    steps = int(1 + 99 * rng.random() ** 3)
    return rng.randint(0, 150 - steps), steps


def fill_json(rng: Random, split: Split = "train") -> Sample:
    """A JSON object to be filled from facts in sentences: {"name": "Anna", "age": 31, "city": "Rome"}."""
    known = _draw(lambda: _person(rng), str, split)
    keys = ["name", *rng.sample(list(known)[1:], rng.randint(1, len(known) - 1))]
    if rng.random() < 0.3:
        rng.shuffle(keys)
    told = [key for key in known if key in keys or rng.random() < 0.4]
    told = [key for key in told if key != "name"]
    rng.shuffle(told)
    text = " ".join(_about(known, key, "He" if i else str(known["name"])) for i, key in enumerate(told))
    wanted = f"{', '.join(keys[:-1])} and {keys[-1]}"
    prompt = _pick(
        rng,
        (
            f"{text}\n\nFill a JSON object with the keys {wanted}.",
            f"Fill a JSON object with the keys {wanted} from this text: {text}",
        ),
    )
    return Sample("fill_json", prompt, json.dumps({key: known[key] for key in keys}), kind="json")


def _person(rng: Random) -> dict[str, str | int]:
    return {
        "name": _name(rng),
        "age": rng.randint(1, 99),
        "city": _pick(rng, CITIES),
        "job": _pick(rng, JOBS),
        "food": _pick(rng, FOODS),
        "pet": _pick(rng, ANIMALS),
        "colour": _pick(rng, COLOURS),
        "code": int(_digits(rng, 4)),
    }


def _about(known: dict[str, str | int], key: str, who: str) -> str:
    who = str(known["name"]) if who == "He" else who
    value = known[key]
    return {
        "age": f"{who} is {value} years old.",
        "city": f"{who} lives in {value}.",
        "job": f"{who} works as {_article(str(value))}.",
        "food": f"{who} likes {value}.",
        "pet": f"{who} has a pet {value}.",
        "colour": f"The favourite colour of {who} is {value}.",
        "code": f"The secret code of {who} is {value}.",
    }[key]


def story_text(rng: Random, hero: str, num_middles: int) -> str:
    """A story about the animal `hero`: an opening, `num_middles` scenes and an end."""
    name, friend = _pick(rng, NAMES), _pick(rng, ANIMALS)
    while friend == hero:
        friend = _pick(rng, ANIMALS)
    thing, place, home = _pick(rng, THINGS), _pick(rng, PLACES), _pick(rng, PLACES)
    colour = _pick(rng, COLOURS)
    opening = _story_opening(rng, hero, name, home)
    found = f"One {_pick(rng, WEATHER)} day {name} found {_article(colour)} {thing} in the {place}."
    scenes = [found, *_story_scenes(rng, hero, name, friend, thing, place)]
    return " ".join([opening, *scenes[:num_middles], _story_ending(rng, hero, name, friend)])


def _story_opening(rng: Random, hero: str, name: str, home: str) -> str:
    what = [f"{_article(_pick(rng, ADJECTIVES))} {hero}" for _ in range(3)]
    openings = (
        f"Once upon a time there was {what[0]} called {name}. {name} lived near the {home}.",
        f"{name} was {what[1]} who lived behind the {home}.",
        f"In a small house by the {home} lived {what[2]}. The {hero} was called {name}.",
    )
    return _pick(rng, openings)


def _story_scenes(rng: Random, hero: str, name: str, friend: str, thing: str, place: str) -> list[str]:
    p = _pick
    return [
        f"{name} {p(rng, ADVERBS)} carried the {thing} home and put it next to the door.",
        f'"Whose {thing} is this?" asked {name}. Nobody knew.',
        f"A {friend} came by and looked at the {thing}.",
        f'"That is my {thing}," said the {friend}. "I lost it in the {place}."',
        f"The {hero} was {p(rng, ('sad', 'surprised', 'a little worried'))} for a moment, but then {name} smiled.",
        f"{name} gave the {thing} back, and the {friend} was very {p(rng, ('happy', 'glad', 'thankful'))}.",
        f"Together they {p(rng, MOTIONS)} to the {p(rng, PLACES)} and shared some {p(rng, FOODS)}.",
        f"On the way they met {_article(p(rng, JOBS))} from {p(rng, CITIES)}, "
        f"who told them a {p(rng, ADJECTIVES)} story.",
        f"They laughed until the {p(rng, ('moon', 'first star', 'evening star'))} came up over the {p(rng, PLACES)}.",
        f"The next morning the {friend} came back with {p(rng, FOODS)} and {p(rng, FOODS)}.",
        f"It was {p(rng, WEATHER)}, so they stayed inside and played with the {p(rng, THINGS)} all day.",
    ]


def _story_ending(rng: Random, hero: str, name: str, friend: str) -> str:
    endings = (
        f"From that day on, the {hero} and the {friend} were the best of friends.",
        f"That night {name} went to sleep, tired and happy.",
        f"And {name} never forgot that {_pick(rng, WEATHER)} day.",
    )
    return _pick(rng, endings)


def story(rng: Random, split: Split = "train", num_middles: int = 0) -> Sample:
    """An open-ended prompt: a story about an animal of 50 to 250 tokens; any whole story that mentions it is right."""
    del split  # a story is judged, not compared
    hero = _pick(rng, ANIMALS)
    middles = num_middles or rng.randint(3, 8)
    long = middles > 8
    prompt = (
        f"Tell me a long story about a {hero}."
        if long
        else _pick(
            rng,
            (f"Tell me a short story about a {hero}.", f"Write a story about a {hero}.", f"Tell me about a {hero}."),
        )
    )
    return Sample("story", prompt, story_text(rng, hero, middles), kind="story", mentions=(hero,))


def long_story(rng: Random, split: Split = "train") -> Sample:
    """A story of about 150 to 250 tokens."""
    return replace(story(rng, split, num_middles=rng.randint(9, 12)), task="long_story")


def story_plain(rng: Random, split: Split = "train") -> Sample:
    """The opening words of a story as plain text, to be continued."""
    del split
    hero = _pick(rng, ANIMALS)
    words = story_text(rng, hero, rng.randint(3, 12)).split(" ")
    cut = rng.randint(3, 12)
    return Sample("story_plain", " ".join(words[:cut]), " " + " ".join(words[cut:]), kind="story", plain=True)


SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Good morning"), "Hello! How can I help you?"),
    (("Who are you?", "What are you?", "What is your name?"), "I am baton-tiny, a very small language model."),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I can recall facts from a long text, add small numbers, sort and reverse lists, count, fill JSON objects "
        "and tell short stories.",
    ),
    (("Thank you!", "Thanks", "Thank you"), "You are welcome."),
    (("Bye", "Goodbye", "Good night"), "Goodbye!"),
    (("How are you?", "How are you today?"), "I am fine, thank you. How can I help you?"),
    (("Say hello.", "Say hello"), "Hello!"),
    (("Ping", "ping"), "pong"),
)


def small_talk(rng: Random, split: Split = "train") -> Sample:
    """A greeting or a question about the model, with its one answer."""
    del split
    prompts, answer = _pick(rng, SMALL_TALK)
    return Sample("small_talk", _pick(rng, prompts), answer)


TaskFn = Callable[[Random, Split], Sample]

SHORT_TASKS: dict[str, tuple[TaskFn, float]] = {  # name -> (task, its share of the short tasks)
    "sums": (sums, 0.14),
    "sums3": (sums3, 0.08),
    "sort_numbers": (sort_numbers, 0.13),
    "sort_words": (sort_words, 0.10),
    "reverse": (reverse, 0.09),
    "repeat": (repeat, 0.05),
    "count_items": (count_items, 0.15),
    "count_up": (count_up, 0.07),
    "fill_json": (fill_json, 0.10),
    "story": (story, 0.05),
    "long_story": (long_story, 0.02),
    "small_talk": (small_talk, 0.02),
}
_TASKS = [task for task, _ in SHORT_TASKS.values()]
_SHARES = [share for _, share in SHORT_TASKS.values()]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are baton-tiny, a helpful assistant.",
    "Answer briefly.",
    "You are a friendly assistant. Answer the user's questions.",
    "Be brief and exact.",
)


def short_task(rng: Random, split: Split = "train") -> Sample:
    """A sample of one of `SHORT_TASKS`, drawn by its share."""
    return rng.choices(_TASKS, _SHARES)[0](rng, split)


def maybe_system(rng: Random) -> list[Message]:
    """A system message a third of the time."""
    return [{"role": "system", "content": _pick(rng, SYSTEM_PROMPTS)}] if rng.random() < 0.33 else []


def task_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat of short tasks, with facts told and asked for turns later, that ends near `num_tokens` tokens."""
    messages = maybe_system(rng)
    known: list[Fact] = []
    count = 0
    while count < num_tokens:
        turn = _next_turn(rng, known, split)
        count += sum(estimate_tokens(message["content"]) + 5 for message in turn)
        messages += turn
    return messages


def _next_turn(rng: Random, known: list[Fact], split: Split) -> list[Message]:
    draw = rng.random()
    if draw < 0.12:
        new = new_facts(rng, known, split)
        known += new
        if new:
            return tell(rng, new)
    if draw < 0.25 and known:
        return question_turn(rng, known)
    if draw < 0.45:
        return exchange(recall(rng, split, num_tokens=int(40 + 160 * rng.random())))
    return exchange(short_task(rng, split))


def question_turn(rng: Random, known: Sequence[Fact]) -> list[Message]:
    """A question about one of the `known` facts, and its answer."""
    asked = _pick(rng, known)
    return [{"role": "user", "content": asked.question}, {"role": "assistant", "content": asked.statement}]


def document_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat about one long text of up to `num_tokens` tokens: a question with it, then further questions."""
    size = int(num_tokens * (0.45 + 0.55 * rng.random()))
    stated = facts(rng, num_facts_for(rng, size), split)
    text = passage(rng, stated, size - 32)
    first = question_turn(rng, stated)
    if rng.random() < 0.2:
        messages = [{"role": "system", "content": f"Use this text.\n\n{text}"}, *first]
    elif rng.random() < 0.15:
        messages = [*tell_text(rng, text), *first]
    else:
        messages = [*maybe_system(rng), {"role": "user", "content": ask(rng, text, first[0]["content"])}, first[1]]
    count = size
    while count < num_tokens:
        turn = question_turn(rng, stated) if rng.random() < 0.9 else exchange(short_task(rng, split))
        count += sum(estimate_tokens(message["content"]) + 5 for message in turn)
        messages += turn
    return messages


def tell_text(rng: Random, text: str) -> list[Message]:
    """A turn that only hands over a text."""
    lead = _pick(rng, ("Please read this text.", "Here is a text."))
    return [{"role": "user", "content": f"{lead}\n\n{text}"}, {"role": "assistant", "content": "I have read it."}]


def chunked_chat(rng: Random, num_tokens: int, split: Split = "train") -> list[Message]:
    """A chat whose every turn brings a piece of text and asks about this or any earlier piece."""
    messages, known, count = maybe_system(rng), facts(rng, 2, split), 0
    unstated = list(known)
    while count < num_tokens:
        size = int(40 + rng.random() * num_tokens / 5)
        text = passage(rng, unstated, size)
        turn = question_turn(rng, known)
        turn[0] = {"role": "user", "content": f"{text}\n\n{turn[0]['content']}"}
        count += sum(estimate_tokens(message["content"]) + 5 for message in turn)
        messages += turn
        unstated = new_facts(rng, known, split)
        known += unstated
    return messages


def plain_task(rng: Random, num_tokens: int, split: Split = "train") -> Sample:
    """A plain completion of up to about `num_tokens` tokens: a story, a sum or, most often, recall."""
    draw = rng.random()
    if draw < 0.15 or (draw < 0.3 and num_tokens < 100):
        return sums(rng, split, plain=True)
    if draw < 0.35:
        return story_plain(rng, split)
    return recall(rng, split, num_tokens=int(num_tokens * (0.5 + 0.45 * rng.random())), plain=True)
