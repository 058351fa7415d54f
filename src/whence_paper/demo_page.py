"""The demonstration's report: the answer in words, the digits by source, the table, and how it was done."""

from __future__ import annotations

import whence
from whence.report import (
    Facts,
    Gallery,
    Group,
    Number,
    Page,
    Row,
    Section,
    Table,
    Tone,
    Words,
    facts,
    most_uncertain,
    rank_scatter,
)

from .demo_task import SIDE, Task
from .demo_trial import HIDDEN, LEARNING_RATE, QUESTIONS, SCORES, WEIGHT_DECAY, Size, Trial, mean_auroc, scores

SHOWN = 24

WORDS = (
    (
        "Ho",
        "How far the answer would move if the training labels were noisy by the same amount everywhere. It is high "
        "where the network had few examples to learn from. It takes one noise level for all, so it cannot see that "
        "some labels are worse than others.",
    ),
    (
        "HeC3",
        "How far the answer would move with another training set altogether. It takes each training example's own "
        "error, as it would be had that example been left out. It is high where examples are few or labels are bad.",
    ),
    (
        "HeC3/Ho",
        "The errors of the training examples that decide this answer, compared with the average error. Well above "
        "one: the labels nearby contradict each other. Check them, or find out what is missing in the inputs.",
    ),
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


def make_page(trials: list[Trial], size: Size) -> Page:
    """The report of some trials; pictures are of the first one."""
    first = trials[0]
    task = first.task
    return Page(
        title="Noisy labels or missing data? What whence says of a network that suffers from both",
        answer=(
            f"A small network learned to sort handwritten digits into two groups. Its training data had two faults: "
            f"each {task.noisy} got its label from a coin, and no {task.missing} was shown at all. whence is not told. "
            f"From the network and its training data it says how uncertain each answer is and why, here for "
            f"{len(task.test_digits)} digits the network had not seen.",
            *findings(trials),
        ),
        numbers=headline(trials),
        sections=(*galleries(first), table_section(trials), words_section(), how(first, size)),
        footer=f"Made by whence {whence.__version__} (python -m whence_paper.demo). Data: the optical recognition of "
        f"handwritten digits set that comes with scikit-learn. Nothing on this page was loaded from elsewhere.",
    )


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


def headline(trials: list[Trial]) -> tuple[Number, ...]:
    """The three numbers on top."""
    mean = mean_auroc(trials)
    over = "one draw" if len(trials) == 1 else f"mean of {len(trials)} draws"

    def number(question: str, score: str, words: str, tone: Tone) -> Number:
        lowest = min(trial.auroc[question][score] for trial in trials)
        return Number(f"{mean[question][score]:.2f}", f"{words} ({over}, lowest {lowest:.2f})", tone)

    return (
        number("noisy", "HeC3/Ho", "AUROC of HeC3/Ho for the digit with random labels", "noise"),
        number("missing", "Ho", "AUROC of Ho for the digit that was never shown", "scarcity"),
        number(QUESTIONS[2], "HeC3/Ho", "AUROC of HeC3/Ho, the first of these against the second", "plain"),
    )


def groups_of(task: Task) -> list[Group]:
    """Which kind each test digit is of."""
    noisy = Group(f"{task.noisy}: random labels in training", "noise")
    missing = Group(f"{task.missing}: never shown in training", "scarcity")
    rest = Group("all other digits")
    kinds = {task.noisy: noisy, task.missing: missing}
    return [kinds.get(digit, rest) for digit in task.test_digits.tolist()]


def galleries(trial: Trial) -> tuple[Section, ...]:
    """The most uncertain digits by source, and all of them by rank."""
    task, uncertainty = trial.task, trial.uncertainty
    names = [f"a {digit}" for digit in task.test_digits.tolist()]
    groups = groups_of(task)
    right = (uncertainty.mean.sign() == task.test_targets).squeeze(1).tolist()
    lines = [("right" if ok else "wrong",) for ok in right]
    images = 1.0 - task.test_inputs.reshape(-1, SIDE, SIDE)

    def gallery(by: str) -> Gallery:
        return most_uncertain(uncertainty, by, SHOWN, names=names, images=images, groups=groups, lines=lines)

    labels = [
        f"{name}, {line[0]}, HeC3/Ho {ratio:.2g}"
        for name, line, ratio in zip(names, lines, uncertainty.ratio.tolist(), strict=True)
    ]
    return (
        Section(
            "Unsure because of noise: check the labels of digits like these",
            (
                f"The {SHOWN} test digits with the highest HeC3/Ho, most suspicious first (draw 1). Right and wrong is "
                f"the network's answer: the group this digit truly belongs to, or the other one.",
            ),
            (gallery("ratio"),),
            "noise",
        ),
        Section(
            "Unsure because of scarcity: collect more digits like these",
            (
                f"The {SHOWN} test digits with the highest Ho, most uncertain first (draw 1). For those in grey there "
                f"were training digits of the same kind, but by this measure few that look alike.",
            ),
            (gallery("ho"),),
            "scarcity",
        ),
        Section(
            "All test digits by both",
            ("Noise lifts a digit above the line. Scarcity moves it to the right, and usually up as well.",),
            (
                rank_scatter(
                    uncertainty,
                    groups,
                    labels,
                    f"The {len(names)} test digits of draw 1: rank by Ho against rank by HeC3, both from the surest "
                    f"to the most uncertain. On the line both agree.",
                ),
            ),
        ),
    )


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
    return Section("How well they were told apart", (), (table,))


def questions(task: Task) -> tuple[str, str, str]:
    """The three questions of a draw, in words."""
    return f"{task.noisy}, random labels", f"{task.missing}, never shown", f"{task.noisy} against {task.missing}"


def cells(auroc: dict[str, float]) -> tuple[str, ...]:
    """Areas with two digits, in the order of the columns."""
    return tuple(f"{auroc[name]:.2f}" for name in SCORES)


def words_section() -> Section:
    """What the words on this page mean."""
    return Section("What the words mean", (), (Words(WORDS),))


def how(trial: Trial, size: Size) -> Section:
    """Settings, and what whence reports of the fit."""
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
        "How it was computed",
        (
            "Draw 1. The weight decay is the paper's, the ridge lambda is what this weight decay amounts to, and the "
            "steps bring the network near its optimum. True labels of test digits were used for the table and the "
            "colours, for nothing else.",
        ),
        (settings, facts(trial.diagnostics)),
    )
