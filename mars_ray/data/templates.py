"""The texts of the built-in corpus: word problems of one to three steps.

`{name}` and `{friend}` are two people, `{things}` is what they count, `{boxes}`/`{box}` what it is
kept in; `{a}` to `{d}` are the numbers. In a solution, `[a + b]` becomes `5 + 3 = 8`; the result of
the first step is x, of the second y, of the third z, and later steps may use them.
`answer` says in plain arithmetic, without the steps, what the last result must be.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Template:
    """A question and the sentences that solve it, one sentence a step."""

    question: str
    steps: tuple[str, ...]
    answer: Callable[..., int]


NAMES = (
    "Adam",
    "Alice",
    "Anna",
    "Ben",
    "Clara",
    "Daniel",
    "David",
    "Ella",
    "Emma",
    "Eric",
    "Grace",
    "Hannah",
    "Henry",
    "Jack",
    "James",
    "Julia",
    "Kate",
    "Laura",
    "Leo",
    "Lily",
    "Lucy",
    "Maria",
    "Mark",
    "Mia",
    "Nina",
    "Oscar",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
)
THINGS = (
    "apples",
    "pears",
    "plums",
    "lemons",
    "cookies",
    "muffins",
    "candies",
    "nuts",
    "eggs",
    "pencils",
    "pens",
    "books",
    "cards",
    "stamps",
    "coins",
    "marbles",
    "beads",
    "shells",
    "stickers",
    "buttons",
)
BOXES = (
    ("box", "boxes"),
    ("bag", "bags"),
    ("basket", "baskets"),
    ("jar", "jars"),
    ("tray", "trays"),
)

ONE_STEP = (
    Template(
        "{name} has {a} {things}. {friend} gives {name} {b} more. How many {things} does {name} "
        "have now?",
        ("{name} starts with {a} {things} and gets {b} more from {friend}, so [a + b].",),
        lambda a, b: a + b,
    ),
    Template(
        "There are {a} {things} on the table. {name} puts {b} more there. How many {things} are "
        "on the table?",
        ("The table had {a} {things} and {name} put {b} more on it, so [a + b].",),
        lambda a, b: a + b,
    ),
    Template(
        "{name} found {a} {things} and {friend} found {b}. How many {things} did they find "
        "together?",
        ("Together {name} and {friend} found {a} {things} and {b} {things}, so [a + b].",),
        lambda a, b: a + b,
    ),
    Template(
        "{friend} has {a} {things}. {name} has {b} more {things} than {friend}. How many {things} "
        "does {name} have?",
        ("{name} has {b} more than the {a} {things} of {friend}, so [a + b].",),
        lambda a, b: a + b,
    ),
    Template(
        "{name} had {a} {things} and gave {b} of them to {friend}. How many {things} does {name} "
        "have left?",
        ("{name} had {a} {things} and gave {b} away to {friend}, so [a - b].",),
        lambda a, b: a - b,
    ),
    Template(
        "A shop had {a} {things} and sold {b} of them to {name}. How many {things} does the shop "
        "still have?",
        ("The shop had {a} {things} and sold {b} of them, so [a - b].",),
        lambda a, b: a - b,
    ),
    Template(
        "{friend} has {a} {things}. {name} has {b} fewer {things} than {friend}. How many "
        "{things} does {name} have?",
        ("{name} has {b} fewer than the {a} {things} of {friend}, so [a - b].",),
        lambda a, b: a - b,
    ),
    Template(
        "{name} wants to collect {a} {things} and has {b} so far. How many {things} are still "
        "missing?",
        ("{name} wants {a} {things} and already has {b} of them, so [a - b].",),
        lambda a, b: a - b,
    ),
    Template(
        "{name} has {a} {boxes} with {b} {things} in each {box}. How many {things} does {name} "
        "have?",
        ("There are {a} {boxes} and each {box} holds {b} {things}, so [a x b].",),
        lambda a, b: a * b,
    ),
    Template(
        "{name} buys {b} {things} every day. How many {things} does {name} buy in {a} days?",
        ("{name} buys {b} {things} on each of the {a} days, so [a x b].",),
        lambda a, b: a * b,
    ),
    Template(
        "{name} gives {b} {things} to each of {a} friends. How many {things} does {name} give "
        "away?",
        ("Each of the {a} friends gets {b} {things} from {name}, so [a x b].",),
        lambda a, b: a * b,
    ),
    Template(
        "{friend} has {a} {things}. {name} has {b} times as many. How many {things} does {name} "
        "have?",
        ("{name} has {b} times the {a} {things} of {friend}, so [a x b].",),
        lambda a, b: a * b,
    ),
)

TWO_STEPS = (
    Template(
        "{name} has {a} {things}, buys {b} more and then gives {c} to {friend}. How many {things} "
        "are left?",
        (
            "After buying, {name} has [a + b] {things}.",
            "After giving, {name} has [x - c] {things}.",
        ),
        lambda a, b, c: a + b - c,
    ),
    Template(
        "{name} had {a} {things}, lost {b} of them and then found {c} new ones. How many {things} "
        "does {name} have?",
        ("After losing some, {name} has [a - b] {things}.", "With the new ones, that is [x + c]."),
        lambda a, b, c: a - b + c,
    ),
    Template(
        "{name} had {a} {things}. {name} gave {b} to {friend} and used {c}. How many {things} "
        "remain?",
        ("After giving, {name} has [a - b] {things}.", "After using some, {name} has [x - c]."),
        lambda a, b, c: a - b - c,
    ),
    Template(
        "On Monday {name} found {a} {things}, on Tuesday {b} and on Friday {c}. How many {things} "
        "is that?",
        ("By Tuesday {name} has [a + b] {things}.", "By Friday {name} has [x + c] {things}."),
        lambda a, b, c: a + b + c,
    ),
    Template(
        "{name} fills {a} {boxes} with {b} {things} each and has {c} {things} over. How many "
        "{things} are there?",
        ("The {boxes} hold [a x b] {things}.", "With the ones left over, that is [x + c]."),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "{name} has {a} {boxes} of {b} {things} and gives {c} {things} to {friend}. How many "
        "{things} are left?",
        ("In the {boxes} are [a x b] {things}.", "After giving, {name} has [x - c] {things}."),
        lambda a, b, c: a * b - c,
    ),
    Template(
        "{friend} has {a} {things}. {name} has {b} times as many. How many {things} do they have "
        "together?",
        ("{name} has [a x b] {things}.", "Together they have [x + a] {things}."),
        lambda a, b: a * (b + 1),
    ),
    Template(
        "{friend} has {a} {things}. {name} has {b} times as many. How many more {things} does "
        "{name} have?",
        ("{name} has [a x b] {things}.", "That is [x - a] more than {friend} has."),
        lambda a, b: a * (b - 1),
    ),
    Template(
        "{name} has {a} {things} and gets {b} more. Each costs {c} dollars. How many dollars are "
        "they worth?",
        ("{name} has [a + b] {things}.", "At {c} dollars each they are worth [x x c] dollars."),
        lambda a, b, c: (a + b) * c,
    ),
    Template(
        "{name} has {a} {things}, throws {b} away and sells the rest for {c} dollars each. How "
        "many dollars is that?",
        ("There are [a - b] {things} to sell.", "At {c} dollars each {name} gets [x x c] dollars."),
        lambda a, b, c: (a - b) * c,
    ),
    Template(
        "{friend} has {a} {things} and {name} has {b} more than {friend}. How many {things} do "
        "both have?",
        ("{name} has [a + b] {things}.", "Both together have [x + a] {things}."),
        lambda a, b: 2 * a + b,
    ),
    Template(
        "{name} reads {a} pages a day for {b} days. The book has {c} more pages. How long is the "
        "book?",
        ("{name} reads [a x b] pages.", "With the other pages the book has [x + c] pages."),
        lambda a, b, c: a * b + c,
    ),
    Template(
        "{name} walks {a} steps, {friend} walks {b} fewer, and then {friend} walks {c} more. How "
        "far does {friend} go?",
        ("At first {friend} walks [a - b] steps.", "Then {friend} gets to [x + c] steps."),
        lambda a, b, c: a - b + c,
    ),
    Template(
        "A bus has {a} people. At one stop {b} leave and at the next {c} leave. How many people "
        "stay on the bus?",
        ("After one stop there are [a - b] people.", "After the next there are [x - c] people."),
        lambda a, b, c: a - b - c,
    ),
    Template(
        "{name} has {a} shelves, each with {b} {boxes} of {c} {things}. How many {things} does "
        "{name} have?",
        ("The shelves hold [a x b] {boxes}.", "In the {boxes} are [x x c] {things}."),
        lambda a, b, c: a * b * c,
    ),
    Template(
        "{name} earns {b} dollars an hour, works {a} hours and spends {c} dollars. How many "
        "dollars are left?",
        ("{name} earns [a x b] dollars.", "After spending some, {name} has [x - c] dollars."),
        lambda a, b, c: a * b - c,
    ),
    Template(
        "There are {a} birds in a tree. {b} more come and then {c} fly away. How many birds are "
        "in the tree?",
        ("With the new ones there are [a + b] birds.", "Then some leave and [x - c] birds stay."),
        lambda a, b, c: a + b - c,
    ),
    Template(
        "{name} is {a} years old. {friend} is {b} years older. How old will {friend} be in {c} "
        "years?",
        ("{friend} is now [a + b] years old.", "In {c} years {friend} will be [x + c] years old."),
        lambda a, b, c: a + b + c,
    ),
    Template(
        "{name} pays {a} dollars for {things}, {b} dollars less for bread and {c} dollars more "
        "for tea than for bread. How many dollars is the tea?",
        ("The bread costs [a - b] dollars.", "The tea costs [x + c] dollars."),
        lambda a, b, c: a - b + c,
    ),
)

THREE_STEPS = (
    Template(
        "{name} has {a} {boxes} of {b} {things}, finds {c} more and gives {d} to {friend}. How "
        "many {things} are left?",
        (
            "In the {boxes} are [a x b] {things}.",
            "With the new ones, that is [x + c].",
            "After giving, {name} has [y - d].",
        ),
        lambda a, b, c, d: a * b + c - d,
    ),
    Template(
        "{name} fills {a} {boxes} with {b} {things}. Then {c} break and {friend} brings {d} more. "
        "How many {things} are there?",
        (
            "The {boxes} hold [a x b] {things}.",
            "After some break, there are [x - c].",
            "With the new ones, that is [y + d].",
        ),
        lambda a, b, c, d: a * b - c + d,
    ),
    Template(
        "{name} had {a} {things}, gave {b} to {friend}, lost {c} and bought {d}. How many "
        "{things} does {name} have?",
        (
            "After giving, {name} has [a - b].",
            "After losing some, {name} has [x - c].",
            "After buying, {name} has [y + d].",
        ),
        lambda a, b, c, d: a - b - c + d,
    ),
    Template(
        "{name} has {a} {things}, gets {b} more, gives {c} away and then gets {d}. How many "
        "{things} does {name} have?",
        (
            "At first {name} gets to [a + b].",
            "After giving, {name} has [x - c].",
            "At the end {name} has [y + d].",
        ),
        lambda a, b, c, d: a + b - c + d,
    ),
    Template(
        "{friend} has {a} {things}. {name} has {b} times as many and then gives {c} away. How "
        "many do both have?",
        (
            "{name} has [a x b] {things}.",
            "After giving, {name} has [x - c].",
            "Together they have [y + a].",
        ),
        lambda a, b, c: a * (b + 1) - c,
    ),
    Template(
        "{name} has {a} red and {b} blue {things}, sells all for {c} dollars each and spends {d} "
        "dollars. How many dollars are left?",
        (
            "There are [a + b] {things}.",
            "For them {name} gets [x x c] dollars.",
            "After spending some, {name} has [y - d].",
        ),
        lambda a, b, c, d: (a + b) * c - d,
    ),
    Template(
        "{name} has {a} {things}, uses {b}, sells the rest for {c} dollars each and gets {d} "
        "dollars from {friend}. How many dollars does {name} have?",
        (
            "There are [a - b] {things} to sell.",
            "For them {name} gets [x x c] dollars.",
            "With the rest, that is [y + d].",
        ),
        lambda a, b, c, d: (a - b) * c + d,
    ),
    Template(
        "{name} works {a} days for {b} dollars a day, pays {c} dollars for {things} and {d} "
        "dollars for tea. How many dollars are left?",
        (
            "{name} earns [a x b] dollars.",
            "After the {things}, [x - c] are left.",
            "After the tea, [y - d] are left.",
        ),
        lambda a, b, c, d: a * b - c - d,
    ),
    Template(
        "A class has {a} rows of {b} seats and {c} seats at the back. {d} seats are free. How "
        "many seats are taken?",
        (
            "The rows have [a x b] seats.",
            "With the back, there are [x + c].",
            "Of these [y - d] are taken.",
        ),
        lambda a, b, c, d: a * b + c - d,
    ),
    Template(
        "{name} has {a} {things}. {friend} has {b} more than {name}, and Max has {c} fewer than "
        "{friend}. How many do {name} and Max have?",
        (
            "{friend} has [a + b] {things}.",
            "Max has [x - c] {things}.",
            "{name} and Max have [y + a].",
        ),
        lambda a, b, c: 2 * a + b - c,
    ),
)

TEMPLATES = ONE_STEP + TWO_STEPS + THREE_STEPS

# Several ways to begin and to end leave the model something to be unsure of, as real text does.
OPENINGS = (
    ("Let us solve this step by step.", 0.6),
    ("We go step by step.", 0.3),
    ("First we look at the numbers.", 0.1),
)
CLOSINGS = (("So the answer is {answer}.", 0.7), ("The answer is {answer}.", 0.3))
