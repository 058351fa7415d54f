"""The demonstration on an ordinary classifier: ten digits, cross-entropy, one digit noisy and one never shown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import whence

from .demo_task import DIGITS, SIDE
from .demo_trial import FULL, HIDDEN, LEARNING_RATE, QUESTIONS, Size
from .feature_scores import answers_and_features, class_density, class_distance, neighbour_scores, probability_scores

WEIGHT_DECAY = 1e-4
OURS = ("noise", "scarcity", "source", "doubt")
THEIRS = ("entropy", "margin", "energy", "kNN label entropy", "kNN residual", "kNN distance", "DDU", "Mahalanobis")
GROUPS = ("noisy", "missing", "others")
VERDICTS = ("confident", "noisy labels nearby", "scarce data", "both")


@dataclass(frozen=True)
class Classes:
    """What came out of one draw.

    Attributes:
        noisy: the digit whose training labels were drawn at random.
        missing: the digit that was taken out of the training set.
        auroc: for each question and score, as for the two groups of digits.
        verdicts: for the noisy, the missing and the other digits, the share of each verdict.
        accuracy: share of right answers on test digits that are neither noisy nor missing.
    """

    noisy: int
    missing: int
    auroc: dict[str, dict[str, float]]
    verdicts: dict[str, dict[str, float]]
    accuracy: float


def run_classes(seed: int, size: Size = FULL) -> Classes:
    """Draw the faults, train a network, fit `whence` and ask about the test digits."""
    generator = torch.Generator().manual_seed(seed)
    data = load_digits()
    pixels, digits = torch.from_numpy(data.data / 16.0), torch.from_numpy(data.target).long()
    noisy, missing = torch.randperm(DIGITS, generator=generator)[:2].tolist()
    order = torch.randperm(len(digits), generator=generator)
    shown, test = order[: size.train_size], order[size.train_size :]
    shown = shown[digits[shown] != missing]
    others = torch.tensor([digit for digit in range(DIGITS) if digit != missing])
    random = others[torch.randint(DIGITS - 1, (len(shown),), generator=generator)]
    labels = torch.where(digits[shown] == noisy, random, digits[shown])
    network = train(pixels[shown], labels, size.steps, generator)
    ridge = whence.ridge_from_weight_decay(WEIGHT_DECAY, len(shown), loss="cross_entropy")
    fitted = whence.fit(
        network,
        [(pixels[shown], labels)],
        likelihood="categorical",
        structure="ekfac",
        ridge=ridge,
        progress=False,
    )
    found = fitted.explain(pixels[test])
    kinds = digits[test]
    answers, features = answers_and_features(network, pixels[test])
    known_answers, known = answers_and_features(network, pixels[shown])
    one_hot = nn.functional.one_hot(labels, DIGITS).to(known.dtype)
    squares = (one_hot - known_answers.softmax(1)).square().sum(1)
    values: dict[str, Tensor] = {
        **{name: getattr(found, name) for name in OURS},
        **probability_scores(answers.softmax(1)),
        "energy": -answers.logsumexp(1),
        **neighbour_scores(known, one_hot, squares, features),
        "DDU": -class_density(known, labels, features),
        "Mahalanobis": class_distance(known, labels, features),
    }
    of_noisy, of_missing = kinds == noisy, kinds == missing
    everywhere = torch.ones_like(of_noisy)
    asked = ((of_noisy, everywhere), (of_missing, everywhere), (of_noisy, of_noisy | of_missing))
    verdicts = torch.tensor([VERDICTS.index(verdict) for verdict in found.verdicts])
    ordinary = ~of_noisy & ~of_missing
    return Classes(
        noisy=noisy,
        missing=missing,
        auroc={
            question: {
                name: float(roc_auc_score(positive[among].numpy(), values[name][among].numpy()))
                for name in (*OURS, *THEIRS)
            }
            for question, (positive, among) in zip(QUESTIONS, asked, strict=True)
        },
        verdicts={
            group: {name: float((verdicts[which] == number).double().mean()) for number, name in enumerate(VERDICTS)}
            for group, which in zip(GROUPS, (of_noisy, of_missing, ordinary), strict=True)
        },
        accuracy=float((answers.argmax(1) == kinds)[ordinary].double().mean()),
    )


def train(inputs: Tensor, labels: Tensor, steps: int, generator: torch.Generator) -> nn.Sequential:
    """Cross-entropy, full batch, Adam with weight decay, step size falling to zero along a cosine."""
    seed = int(torch.randint(2**31, (), generator=generator))
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator: leave it as it was
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(SIDE * SIDE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIGITS)).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def mean_classes(draws: list[Classes]) -> Classes:
    """The mean over draws of every number; the digits are those of the first draw."""
    first = draws[0]
    return Classes(
        noisy=first.noisy,
        missing=first.missing,
        auroc={
            question: {name: sum(one.auroc[question][name] for one in draws) / len(draws) for name in found}
            for question, found in first.auroc.items()
        },
        verdicts={
            group: {name: sum(one.verdicts[group][name] for one in draws) / len(draws) for name in found}
            for group, found in first.verdicts.items()
        },
        accuracy=sum(one.accuracy for one in draws) / len(draws),
    )
