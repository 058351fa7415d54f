"""One trial of the demonstration: train, fit, and score how well noise and scarcity were found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import whence

from .demo_task import SIDE, Task, draw_task

# The weight decay is the paper's. Nothing here was chosen by looking at test digits: the number of steps and their
# size bring the network near its optimum, which `whence` reports ("Newton change").
HIDDEN = 64
WEIGHT_DECAY = 1e-2
LEARNING_RATE = 1e-2

SCORES = ("Ho", "HeC3", "HeC3/Ho", "margin")
QUESTIONS = ("noisy", "missing", "noisy or missing")


@dataclass(frozen=True)
class Size:
    """How much to do in a trial."""

    train_size: int = 1200
    steps: int = 500


FULL = Size()
QUICK = Size(train_size=800, steps=200)


@dataclass(frozen=True)
class Trial:
    """What came out of one draw.

    Attributes:
        seed: of the draw.
        task: the digits and the faults.
        uncertainty: of the m test digits.
        auroc: for each question and score, see `areas`.
        accuracy: share of right answers on test digits that are neither noisy nor missing.
        tracer: the fit.
    """

    seed: int
    task: Task
    uncertainty: whence.Uncertainty
    auroc: dict[str, dict[str, float]]
    accuracy: float
    tracer: whence.Tracer


def run_trial(seed: int, size: Size = FULL) -> Trial:
    """Draw a task, train a network on it, fit `whence` and ask about the test digits."""
    generator = torch.Generator().manual_seed(seed)
    task = draw_task(generator, size.train_size)
    network = train(task, size.steps, generator)
    tracer = whence.fit(
        network,
        [(task.train_inputs, task.train_targets)],
        ridge=whence.ridge_from_weight_decay(WEIGHT_DECAY, len(task.train_inputs)),
        progress=False,
    )
    uncertainty = tracer.predict(task.test_inputs)
    right = (uncertainty.mean.sign() == task.test_targets).squeeze(1)
    return Trial(
        seed=seed,
        task=task,
        uncertainty=uncertainty,
        auroc=areas(uncertainty, task),
        accuracy=float(right[task.ordinary].double().mean()),
        tracer=tracer,
    )


def train(task: Task, steps: int, generator: torch.Generator) -> nn.Sequential:
    """Least squares on +1 and -1, full batch, Adam with weight decay, step size falling to zero along a cosine."""
    seed = int(torch.randint(2**31, (), generator=generator))
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator: leave it as it was
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(task.train_inputs), task.train_targets)
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def scores(uncertainty: whence.Uncertainty) -> dict[str, Tensor]:
    """(m,) each; higher means less sure. The margin |f| is what one would look at without `whence`."""
    values = (uncertainty.ho.sum(1), uncertainty.hec3.sum(1), uncertainty.ratio, -uncertainty.mean.abs().sum(1))
    return dict(zip(SCORES, values, strict=True))


def areas(uncertainty: whence.Uncertainty, task: Task) -> dict[str, dict[str, float]]:
    """Area under the ROC curve for three questions.

    "noisy" and "missing" set the digits of that class against all other test digits, as in the paper's Table 1;
    "noisy or missing" sets the noisy against the missing class, all others left out. It is the probability that the
    score is higher for a digit of the first kind than for one of the second; 0.5 is chance.
    """
    noisy, missing = task.test_digits == task.noisy, task.test_digits == task.missing
    everywhere = torch.ones_like(noisy)
    questions = dict(
        zip(QUESTIONS, ((noisy, everywhere), (missing, everywhere), (noisy, noisy | missing)), strict=True)
    )
    return {
        question: {
            name: float(roc_auc_score(positive[among].numpy(), values[among].numpy()))
            for name, values in scores(uncertainty).items()
        }
        for question, (positive, among) in questions.items()
    }


def mean_auroc(trials: list[Trial]) -> dict[str, dict[str, float]]:
    """The mean over trials of each area."""
    return {
        question: {name: sum(trial.auroc[question][name] for trial in trials) / len(trials) for name in SCORES}
        for question in QUESTIONS
    }
