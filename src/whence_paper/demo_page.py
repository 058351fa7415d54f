"""What the demonstration adds to its report: the answer in words, the table of all draws, and how it was done."""

from __future__ import annotations

from whence.report import Facts, Group, Row, Section, Table, Words

from .demo_classes import GROUPS, OURS, THEIRS, Classes, mean_classes
from .demo_task import SIDE, Task
from .demo_trial import HIDDEN, LEARNING_RATE, QUESTIONS, SCORES, WEIGHT_DECAY, Size, Trial, mean_auroc, scores

TITLE = "Noisy labels or missing data? What whence says of a network that suffers from both"
SHOWN = 24

WORDS = (
    (
        "margin",
        "How far the network's output is from the border between its two answers. What one would look at without "
        "whence. Here a small margin counts as uncertain.",
    ),
    (
        "AUROC",
        "The probability that a score is higher for a digit of the kind in question than for one of the others. "
        "1 is perfect, 0.5 is chance, below 0.5 the score points the other way.",
    ),
)


def about(trials: list[Trial]) -> tuple[str, ...]:
    """What the report is about."""
    task = trials[0].task
    return (
        "A small network learned to sort handwritten digits into two groups. Its training data had two faults: each "
        f"{task.noisy} got its label from a coin, and no {task.missing} was shown at all. whence knows neither. From "
        "the network and its training data it says how uncertain each answer is and why, here for "
        f"{len(task.test_digits)} digits the network had not seen.",
    )


def sections(trials: list[Trial], classes: list[Classes], size: Size) -> tuple[Section, ...]:
    """What comes on top of what every report has."""
    return table_section(trials), classes_section(classes), how(trials[0], size)


def findings(trials: list[Trial]) -> tuple[str, ...]:
    """What was found, in words that follow the numbers."""
    first, mean = trials[0], mean_auroc(trials)
    noisy, missing = among_top(first, "HeC3/Ho", first.task.noisy), among_top(first, "Ho", first.task.missing)
    which = mean[QUESTIONS[2]]
    return (
        f"Noise was {grade(mean['noisy']['HeC3/Ho'])}: of the {SHOWN} test digits with the highest HeC3/Ho, {noisy} "
        f"are {first.task.noisy}s.",
        f"Scarcity was {grade(mean['missing']['Ho'])}: of the {SHOWN} with the highest Ho, {missing} are "
        f"{first.task.missing}s.",
        f"Which of the two is it? HeC3/Ho sets the noisy digit apart from the missing one with an AUROC of "
        f"{which['HeC3/Ho']:.2f}. The margin of the network's output, which needs no whence, reaches "
        f"{which['margin']:.2f}; 0.5 is chance.",
    )


def grade(auroc: float) -> str:
    """A word for an area under the curve.

    Examples:
        >>> grade(0.99), grade(0.9), grade(0.7), grade(0.5)
        ('found almost without fail', 'found well', 'found, but not reliably', 'not found')
    """
    steps = ((0.95, "found almost without fail"), (0.8, "found well"), (0.6, "found, but not reliably"))
    return next((words for least, words in steps if auroc >= least), "not found")


def among_top(trial: Trial, score: str, digit: int) -> int:
    """How many of the digits with the highest score are that digit."""
    best = scores(trial.uncertainty)[score].argsort(descending=True, stable=True)[:SHOWN]
    return int((trial.task.test_digits[best] == digit).sum())


def groups_of(task: Task) -> list[Group]:
    """Which kind each test digit is of."""
    noisy = Group(f"{task.noisy}: random labels in training", "noise")
    missing = Group(f"{task.missing}: never shown in training", "scarcity")
    rest = Group("all other digits")
    kinds = {task.noisy: noisy, task.missing: missing}
    return [kinds.get(digit, rest) for digit in task.test_digits.tolist()]


def names(task: Task) -> tuple[str, str]:
    """The two groups by their digits, that with target -1 first."""
    others = [digit for digit in range(10) if digit not in task.plus]
    return " ".join(map(str, others)), " ".join(map(str, task.plus))


def ids(task: Task) -> list[str]:
    """Each test digit, told by which it truly is."""
    return [f"test digit {place}, a {digit}" for place, digit in enumerate(task.test_digits.tolist())]


def table_section(trials: list[Trial]) -> Section:
    """Every draw, and the mean."""
    rows = [
        Row(question, cells(trial.auroc[name]), f"Draw {number}, {trial.accuracy:.1%} right on all other digits")
        for number, trial in enumerate(trials, 1)
        for name, question in zip(QUESTIONS, questions(trial.task), strict=True)
    ]
    if len(trials) > 1:
        mean = mean_auroc(trials)
        spoken = ("digit with random labels", "digit never shown", "the first against the second")
        rows += [
            Row(question, cells(mean[name]), f"Mean of {len(trials)} draws", strong=True)
            for name, question in zip(QUESTIONS, spoken, strict=True)
        ]
    table = Table(
        caption="AUROC of each score. Each draw has its own two groups, noisy digit, missing digit and network.",
        columns=("test digits", *SCORES),
        rows=tuple(rows),
        note="The first two rows of a draw set one digit against all other test digits, as in the paper's Table 1. "
        "The third sets the noisy against the missing digit, all others left out: near 1 the score points to noise, "
        "near 0 to scarcity, near 0.5 it cannot tell.",
    )
    return Section("Found, or not?", findings(trials), (table, Words(WORDS)))


def classes_section(classes: list[Classes]) -> Section:
    """An ordinary classifier of all ten digits: areas beside scores that need no whence, and verdicts."""
    mean = mean_classes(classes)
    rows = []
    for number, draw in enumerate(classes, 1):
        asked = (f"{draw.noisy}, random labels", f"{draw.missing}, never shown", f"{draw.noisy} against {draw.missing}")
        rows += [
            Row(question, class_cells(draw, name), f"Draw {number}, {draw.accuracy:.1%} right on all other digits")
            for name, question in zip(QUESTIONS, asked, strict=True)
        ]
    if len(classes) > 1:
        spoken = ("digit with random labels", "digit never shown", "the first against the second")
        rows += [
            Row(question, class_cells(mean, name), f"Mean of {len(classes)} draws", strong=True)
            for name, question in zip(QUESTIONS, spoken, strict=True)
        ]
    areas = Table(
        caption="AUROC. Noise, scarcity and source are those of `explain`; the others need no whence.",
        columns=("test digits", *OURS, *THEIRS),
        rows=tuple(rows),
        note="Entropy and margin of the network's probabilities; label entropy of the 50 nearest training digits in "
        "its last features, and their distance; DDU: the density of a Gaussian for each class there.",
    )
    verdicts = Table(
        caption=f"Verdicts, the mean of {len(classes)} {'draw' if len(classes) == 1 else 'draws'}.",
        columns=("test digits", *mean.verdicts[GROUPS[0]]),
        rows=tuple(
            Row(words, tuple(f"{share:.0%}" for share in mean.verdicts[group].values()))
            for group, words in zip(GROUPS, ("random labels", "never shown", "all others"), strict=True)
        ),
    )
    words = (
        "The same faults in an ordinary classifier: ten classes, cross-entropy, other draws of the two digits. Of the "
        f"digits with random labels {mean.verdicts['noisy']['noisy labels nearby']:.0%} are called noisy, of those "
        f"never shown {mean.verdicts['missing']['scarce data']:.0%} scarce, and of all others "
        f"{mean.verdicts['others']['confident']:.0%} confident.",
    )
    return Section("Ten digits, cross-entropy", words, (areas, verdicts))


def class_cells(draw: Classes, question: str) -> tuple[str, ...]:
    """Areas with two digits, in the order of the columns."""
    return tuple(f"{draw.auroc[question][name]:.2f}" for name in (*OURS, *THEIRS))


def questions(task: Task) -> tuple[str, str, str]:
    """The three questions of a draw, in words."""
    return f"{task.noisy}, random labels", f"{task.missing}, never shown", f"{task.noisy} against {task.missing}"


def cells(auroc: dict[str, float]) -> tuple[str, ...]:
    """Areas with two digits, in the order of the columns."""
    return tuple(f"{auroc[name]:.2f}" for name in SCORES)


def how(trial: Trial, size: Size) -> Section:
    """Settings of the first draw."""
    task = trial.task
    others = ", ".join(str(digit) for digit in range(10) if digit not in task.plus)
    settings = Facts(
        (
            ("groups", f"{', '.join(map(str, task.plus))} against {others}", "drawn at random"),
            (
                "training digits",
                str(len(task.train_inputs)),
                f"of {size.train_size}, without the {task.missing}s; the coin made {task.flipped} labels wrong",
            ),
            ("network", f"{SIDE * SIDE} - {HIDDEN} - 1", "one hidden layer, ReLU; squared error on +1 and -1"),
            (
                "training",
                f"{size.steps} steps",
                f"of Adam on all digits at once, step size {LEARNING_RATE} falling to 0, weight decay {WEIGHT_DECAY}",
            ),
            ("seed", str(trial.seed), "of the first draw; each next draw adds one"),
        )
    )
    return Section(
        "How the network was trained",
        (
            "Draw 1. The weight decay is the paper's, the ridge lambda is what this weight decay amounts to, and the "
            "steps bring the network near its optimum. True labels of test digits were used for the table and to tell "
            "right from wrong, for nothing else.",
        ),
        (settings,),
    )
