"""What the demonstration adds to its report: the answer in words, the table of all draws, and how it was done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .demo_classes import GROUPS, OURS, THEIRS, Classes, mean_classes
from .demo_task import SIDE, Task
from .demo_trial import HIDDEN, LEARNING_RATE, QUESTIONS, SCORES, WEIGHT_DECAY, Size, Trial, mean_auroc, scores

if TYPE_CHECKING:
    import pandas

TITLE = "Noisy labels or missing data? What whence says of a network that suffers from both"
SHOWN = 24

WORDS = {
    "margin": "How far the network's output is from the border between its two answers. What one would look at without "
    "whence. Here a small margin counts as uncertain.",
    "AUROC": "The probability that a score is higher for a digit of the kind in question than for one of the others. "
    "1 is perfect, 0.5 is chance, below 0.5 the score points the other way.",
}


def about(trials: list[Trial]) -> tuple[str, ...]:
    """What the report is about."""
    task = trials[0].task
    return (
        "A small network learned to sort handwritten digits into two groups. Its training data had two faults: each "
        f"{task.noisy} got its label from a coin, and no {task.missing} was shown at all. whence knows neither. From "
        "the network and its training data it says how uncertain each answer is and why, here for "
        f"{len(task.test_digits)} digits the network had not seen.",
    )


def sections(trials: list[Trial], classes: list[Classes], size: Size) -> dict[str, list[Any]]:
    """What comes on top of what every report has."""
    return {
        "Found, or not?": two_groups(trials),
        "Ten digits, cross-entropy": ten_classes(classes),
        "How the network was trained": training(trials[0], size),
    }


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


def tones_of(task: Task) -> dict[str, Any]:
    """The kinds of test digits, and how to draw them."""
    return {
        f"{task.noisy}: random labels in training": "noise",
        f"{task.missing}: never shown in training": "scarcity",
        "all other digits": "plain",
    }


def names(task: Task) -> tuple[str, str]:
    """The two groups by their digits, that with target -1 first."""
    others = [digit for digit in range(10) if digit not in task.plus]
    return " ".join(map(str, others)), " ".join(map(str, task.plus))


def ids(task: Task) -> list[str]:
    """Each test digit, told by which it truly is."""
    return [f"test digit {place}, a {digit}" for place, digit in enumerate(task.test_digits.tolist())]


def two_groups(trials: list[Trial]) -> list[Any]:
    """What was found, and the areas of every draw."""
    draws = [(trial.accuracy, questions(trial.task.noisy, trial.task.missing), trial.auroc) for trial in trials]
    return [
        *findings(trials),
        (
            "AUROC of each score. Each draw has its own two groups, noisy digit, missing digit and network.",
            areas_frame(draws, mean_auroc(trials), SCORES),
        ),
        "The first two rows of a draw set one digit against all other test digits, as in the paper's Table 1. The "
        "third sets the noisy against the missing digit, all others left out: near 1 the score points to noise, near 0 "
        "to scarcity, near 0.5 it cannot tell.",
        WORDS,
    ]


def ten_classes(classes: list[Classes]) -> list[Any]:
    """An ordinary classifier of all ten digits: areas beside scores that need no whence, and verdicts."""
    import pandas  # only the page needs it

    mean = mean_classes(classes)
    draws = [(draw.accuracy, questions(draw.noisy, draw.missing), draw.auroc) for draw in classes]
    groups = zip(GROUPS, ("random labels", "never shown", "all others"), strict=True)
    verdicts = pandas.DataFrame({words: mean.verdicts[group] for group, words in groups}).T.map("{:.0%}".format)
    return [
        "The same faults in an ordinary classifier: ten classes, cross-entropy, other draws of the two digits. Of the "
        f"digits with random labels {mean.verdicts['noisy']['noisy labels nearby']:.0%} are called noisy, of those "
        f"never shown {mean.verdicts['missing']['scarce data']:.0%} scarce, and of all others "
        f"{mean.verdicts['others']['confident']:.0%} confident.",
        (
            "AUROC. Noise, scarcity and source are those of `explain`; the others need no whence.",
            areas_frame(draws, mean.auroc, (*OURS, *THEIRS)),
        ),
        "Entropy and margin of the network's probabilities, and the energy of its outputs; of the 50 nearest training "
        "digits in its last features the entropy of labels, the squared residuals and the distance; DDU: the density "
        "of a Gaussian for each class there; Mahalanobis: the distance to the nearest class.",
        (
            f"Verdicts, the mean of {len(classes)} {'draw' if len(classes) == 1 else 'draws'}.",
            verdicts.rename_axis("test digits"),
        ),
    ]


def areas_frame(
    draws: Sequence[tuple[float, tuple[str, ...], Any]], mean: Any, columns: tuple[str, ...]
) -> pandas.DataFrame:
    """Areas with two digits, in rows for each draw and question, and the mean if there are several draws."""
    import pandas  # only the page needs it

    rows = {
        (f"Draw {number}, {accuracy:.1%} right on all other digits", question): auroc[name]
        for number, (accuracy, asked, auroc) in enumerate(draws, 1)
        for name, question in zip(QUESTIONS, asked, strict=True)
    }
    if len(draws) > 1:
        spoken = ("digit with random labels", "digit never shown", "the first against the second")
        rows |= {
            (f"Mean of {len(draws)} draws", words): mean[name] for name, words in zip(QUESTIONS, spoken, strict=True)
        }
    index = pandas.MultiIndex.from_tuples(rows, names=["draw", "test digits"])
    return pandas.DataFrame(list(rows.values()), index, list(columns)).map("{:.2f}".format)


def questions(noisy: int, missing: int) -> tuple[str, str, str]:
    """The three questions of a draw, in words."""
    return f"{noisy}, random labels", f"{missing}, never shown", f"{noisy} against {missing}"


def cells(auroc: dict[str, float]) -> tuple[str, ...]:
    """Areas with two digits, in the order of the columns."""
    return tuple(f"{auroc[name]:.2f}" for name in SCORES)


def training(trial: Trial, size: Size) -> list[Any]:
    """Settings of the first draw."""
    task = trial.task
    others = ", ".join(str(digit) for digit in range(10) if digit not in task.plus)
    return [
        "Draw 1. The weight decay is the paper's, the ridge lambda is what this weight decay amounts to, and the steps "
        "bring the network near its optimum. True labels of test digits were used for the table and to tell right from "
        "wrong, for nothing else.",
        {
            "groups": f"{', '.join(map(str, task.plus))} against {others}, drawn at random",
            "training digits": f"{len(task.train_inputs)} of {size.train_size}, without the {task.missing}s; the coin "
            f"made {task.flipped} labels wrong",
            "network": f"{SIDE * SIDE} - {HIDDEN} - 1: one hidden layer, ReLU; squared error on +1 and -1",
            "training": f"{size.steps} steps of Adam on all digits at once, step size {LEARNING_RATE} falling to 0, "
            f"weight decay {WEIGHT_DECAY}",
            "seed": f"{trial.seed}, of the first draw; each next draw adds one",
        },
    ]
