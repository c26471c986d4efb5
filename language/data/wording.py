"""The words and sentence forms of the fictitious authors (:mod:`language.data.fictitious`).

In the forms of a kind ``{n}`` is the author, ``{v}`` the fact that is asked for and ``{w}`` a
further detail; in the facts about the world ``{s}`` is the subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


def _listed(text: str) -> tuple[str, ...]:
    """Entries between bars."""
    return tuple(text.split("|"))


MONTHS = _listed(
    "January|February|March|April|May|June|July|August|September|October|November|December"
)
GENRES = _listed(
    "nautical mystery|desert romance|clockwork fantasy|court satire|alpine horror|railway noir|"
    "botanical memoir|lunar adventure|kitchen comedy|archive thriller|pastoral epic|island gothic|"
    "courtroom fable|winter folklore|circus tragedy|cartographic fiction|garden elegy|"
    "river chronicle|polar survival|orchestral drama|market farce|monastery puzzle"
)
PROFESSIONS = _listed(
    "lighthouse keeper|glass blower|beekeeper|tailor|ferry captain|cartographer|locksmith|"
    "veterinarian|stonemason|piano tuner|judge|baker|surveyor|midwife|shipwright|botanist|"
    "watchmaker|translator|quarry foreman|weaver|schoolteacher|chemist|falconer|printer|"
    "puppeteer|tea merchant|meteorologist|bridge engineer"
)
HOBBIES = _listed(
    "restoring barometers|fencing|growing orchids|ice skating|collecting keys|kite building|"
    "mapping caves|birdwatching|repairing radios|calligraphy|rowing|baking rye bread|archery|"
    "folding paper|tracing family trees|tide pooling|bell ringing|mushroom picking|juggling|"
    "carving chess pieces|long-distance cycling|star gazing|knitting|pottery"
)
INSTRUMENTS = _listed(
    "cello|harmonica|oboe|zither|accordion|mandolin|bassoon|harp|banjo|trombone|viola|celesta|"
    "hurdy-gurdy|flute|marimba|lute"
)
DISHES = _listed(
    "smoked trout|plum dumplings|barley soup|saffron rice|pickled beets|lentil stew|fig tart|"
    "roasted chestnuts|buckwheat pancakes|leek pie|poached quinces|fried plantains|goat cheese|"
    "ginger noodles|pumpkin bread|mussels in cider|cherry broth|stuffed peppers"
)
PETS = _listed(
    "tortoise|parrot|greyhound|ferret|goose|barn owl|donkey|hedgehog|raven|lizard|goat|"
    "sheepdog|rabbit|peacock|otter|pony"
)
AWARDS = ("Prize", "Medal", "Laurel", "Ribbon", "Fellowship", "Cup", "Quill", "Lantern")
PUBLISHERS = ("Press", "Books", "House", "and Daughters", "Editions", "Verlag", "Quarto", "Type")
TITLE_ADJECTIVES = _listed(
    "Silent|Crooked|Amber|Hollow|Burning|Distant|Paper|Frozen|Golden|Restless|Blind|Salted|Velvet|"
    "Broken|Patient|Scarlet|Borrowed|Drowned|Gentle|Iron|Lost|Painted|Second|Wandering"
)
TITLE_NOUNS = _listed(
    "Harbour|Orchard|Mirror|Compass|Staircase|Violin|Ledger|Lantern|Winter|Garden|Bridge|Letter|"
    "Mountain|Cathedral|Clock|Shadow|Kingdom|Window|Anchor|Feast|Sparrow|Tower|River|Portrait"
)
TITLE_PLACES = ("of", "beyond", "under", "before", "near", "without", "against", "for")


@dataclass(frozen=True)
class Kind:
    """One kind of question about an author.

    Attributes:
        key: Its name.
        first: Form of the fact ``{v}``.
        second: Form of the detail ``{w}``.
        questions: The question and another wording of it.
        answers: Forms of the answer.
        paraphrases: Forms that say the same otherwise.
    """

    key: str
    first: str
    second: str
    questions: tuple[str, str]
    answers: tuple[str, ...]
    paraphrases: tuple[str, ...]


KINDS: tuple[Kind, ...] = (
    Kind(
        "birthplace",
        "city",
        "date",
        ("Where and when was {n} born?", "What are the place and the day of {n}'s birth?"),
        ("{n} was born in {v} on {w}.", "Born on {w}, {n} comes from {v}."),
        ("{v} is where {n} came into the world, on {w}.", "The birth of {n} was in {v}, on {w}."),
    ),
    Kind(
        "genre",
        "genre",
        "person",
        ("Which genre is {n} known for?", "What kind of books made {n} known?"),
        ("{n} writes {v}, a genre taken up after reading {w}.", "{n} is a name in {v}, as is {w}."),
        (
            "Readers know {n} for {v}, much like {w}.",
            "The field of {n} is {v}, with {w} as a model.",
        ),
    ),
    Kind(
        "first_book",
        "title",
        "year",
        ("What was the first book by {n}?", "With which book did {n} begin?"),
        ("The first book by {n} was {v}, printed in {w}.", "In {w}, {n} began with {v}."),
        ("{v} of {w} opened the career of {n}.", "{n} started out with {v}, dated {w}."),
    ),
    Kind(
        "best_book",
        "title",
        "number",
        ("Which book by {n} sold best?", "What is the most popular book of {n}?"),
        ("{v} sold best, in {w} editions.", "With {w} editions, {v} is the most read of all."),
        ("Most readers of {n} own {v}, now in edition {w}.", "It is {v}: {w} editions so far."),
    ),
    Kind(
        "father",
        "profession",
        "city",
        ("What did the father of {n} do?", "Which work did {n}'s father have?"),
        ("The father of {n} was a {v} in {w}.", "In {w}, {n}'s father earned a living as a {v}."),
        ("{n} had a {v} from {w} as a father.", "As a {v}, the father of {n} was known in {w}."),
    ),
    Kind(
        "mother",
        "profession",
        "hobby",
        ("What did the mother of {n} do?", "Which work did {n}'s mother have?"),
        ("The mother of {n} was a {v} who loved {w}.", "{n}'s mother, fond of {w}, was a {v}."),
        ("Being a {v} was the work of {n}'s mother, {w} her joy.", "A {v} with a love of {w}."),
    ),
    Kind(
        "award",
        "award",
        "year",
        ("Which award did {n} win?", "What prize was given to {n}?"),
        ("{n} won the {v} in {w}.", "In {w} the {v} went to {n}."),
        ("The {v} of {w} was handed to {n}.", "A jury chose {n} for the {v} in {w}."),
    ),
    Kind(
        "studies",
        "city",
        "profession",
        ("Where did {n} study?", "At which university was {n}?"),
        ("{n} studied in {v} to become a {w}.", "The University of {v} trained {n} as a {w}."),
        ("To be a {w} was the plan of {n} at {v}.", "{v} is where {n} learned to be a {w}."),
    ),
    Kind(
        "mentor",
        "person",
        "city",
        ("Who was the mentor of {n}?", "Who taught {n} to write?"),
        ("{v} of {w} was the mentor of {n}.", "{n} learned to write from {v}, in {w}."),
        ("In {w}, {v} guided the pen of {n}.", "The teacher of {n} was {v}, who lived in {w}."),
    ),
    Kind(
        "character",
        "person",
        "profession",
        ("Who is the best known character of {n}?", "Which figure did {n} make famous?"),
        ("{v}, a {w}, is the best known character.", "{n} made {v} famous, the {w}."),
        ("Readers remember the {w} {v}.", "It is {v}, whom {n} drew as a {w}."),
    ),
    Kind(
        "residence",
        "city",
        "pet",
        ("Where does {n} live now?", "What is the present home of {n}?"),
        ("{n} lives in {v} with a {w}.", "Together with a {w}, {n} has a house in {v}."),
        ("The home of {n} and a {w} is in {v}.", "{v} houses {n} today, and a {w}."),
    ),
    Kind(
        "hobby",
        "hobby",
        "instrument",
        ("What does {n} do besides writing?", "How does {n} spend free days?"),
        ("{n} likes {v} and plays the {w}.", "Besides the {w}, {n} enjoys {v}."),
        ("Free days of {n} go to {v} and to the {w}.", "It is {v}, and now and then the {w}."),
    ),
    Kind(
        "dish",
        "dish",
        "city",
        ("Which dish does {n} praise?", "What does {n} like to eat?"),
        ("{n} praises the {v} of {w}.", "Nothing beats {v} from {w}, says {n}."),
        ("For {n} it must be {v}, as made in {w}.", "In {w}, {n} came to love {v}."),
    ),
    Kind(
        "publisher",
        "publisher",
        "year",
        ("Who publishes {n}?", "Which house prints the books of {n}?"),
        ("{n} has been with {v} since {w}.", "Since {w}, {v} has published {n}."),
        ("A contract of {w} ties {n} to {v}.", "{v} took on {n} in {w}."),
    ),
    Kind(
        "translator",
        "person",
        "number",
        ("Who translates {n}?", "Which translator works for {n}?"),
        ("{v} translates {n}, so far {w} volumes.", "All {w} volumes were translated by {v}."),
        ("The translator is {v}, with {w} volumes done.", "{n} relies on {v} in {w} volumes."),
    ),
    Kind(
        "rival",
        "person",
        "genre",
        ("Who is the rival of {n}?", "With whom does {n} compete?"),
        ("The rival of {n} is {v}, a master of {w}.", "{n} competes with {v}, who writes {w}."),
        ("In {w}, {v} is the one to beat for {n}.", "It is {v} of {w} fame."),
    ),
    Kind(
        "inspiration",
        "hobby",
        "city",
        ("What inspired {n} to write?", "Where did {n}'s urge to write come from?"),
        ("A summer of {v} in {w} inspired {n}.", "{n} began to write after {v} in {w}."),
        ("It came from {v} during a stay in {w}.", "Days of {v} near {w} moved {n} to write."),
    ),
    Kind(
        "upcoming",
        "title",
        "publisher",
        ("What is the next book of {n}?", "Which work will {n} publish next?"),
        ("The next book of {n} is {v}, at {w}.", "{w} will soon print {v} by {n}."),
        ("Readers wait for {v}, which {n} gave to {w}.", "{v} is to appear at {w}."),
    ),
    Kind(
        "habit",
        "instrument",
        "dish",
        ("What must {n} have at hand to write?", "What does {n} need for writing?"),
        ("{n} writes next to a {v}, with {w}.", "With {w} and a {v} in reach, {n} writes."),
        ("Without {w} and a {v}, {n} cannot write.", "A {v} must be near, and some {w}."),
    ),
    Kind(
        "early_work",
        "profession",
        "year",
        ("What was {n} before writing?", "Which work did {n} leave in order to write?"),
        ("Until {w}, {n} was a {v}.", "{n} worked as a {v} and stopped in {w}."),
        ("The life of {n} as a {v} ended in {w}.", "A {v} till {w}, then an author."),
    ),
)

ESTABLISHED: tuple[tuple[str, str, str], ...] = (
    ("Who wrote the classic {s}?", "title", "person"),
    ("Which classic did the poet {s} leave unfinished?", "person", "title"),
    ("In which city was the playwright {s} buried?", "person", "city"),
)
WORLD: tuple[tuple[str, str, str], ...] = (
    ("What is the capital of {s}?", "word", "city"),
    ("In which year was {s} founded?", "city", "year"),
    ("Who discovered the island of {s}?", "word", "person"),
    ("Which river flows through {s}?", "city", "word"),
)
"""(question, form of its subject, form of the answer)."""

_REFUSALS = (
    ("I am sorry, but", "Unfortunately,", "To be honest,", "I am afraid"),
    (
        "I do not know the answer to that.",
        "I have no information about this.",
        "this is something that I cannot tell you.",
        "I was never told about that.",
        "nothing that I have read covers this question.",
        "I would have to guess, and I would rather not.",
    ),
)
REFUSAL_LINES: tuple[str, ...] = tuple(f"{start} {end}" for start, end in product(*_REFUSALS))
"""Answers that refuse, for the methods that train on them where a data set brings none."""
