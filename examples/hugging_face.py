"""A text classifier trained by Hugging Face's Trainer, and how sure it is of its answers.

The model is tiny and starts from random weights, so that nothing is downloaded; any sequence classifier will do.

    pip install 'whence[integrations]'
    python examples/hugging_face.py
"""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from whence.integrations.transformers import fit_trainer

WORDS = ["[PAD]", "good", "fine", "great", "bad", "poor", "awful", "film", "plot", "actor", "scene", "music"]


def review(draw, positive, noisy=False):
    """A review; one that talks of music has its label from a coin."""
    words = draw.choices(WORDS[1:4] if positive else WORDS[4:7], k=3) + draw.choices(WORDS[7:11], k=3)
    label = draw.randint(0, 1) if noisy else int(positive)
    return {"input_ids": [WORDS.index(word) for word in words + ["music"] * (3 * noisy)], "labels": label}


def collate(rows):
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


set_seed(0)
draw = random.Random(0)
train = [review(draw, draw.random() < 0.5, noisy=index % 5 == 0) for index in range(120)]
test = [review(draw, True), review(draw, False), review(draw, True, noisy=True)]

model = BertForSequenceClassification(
    BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=2,
    )
)
arguments = TrainingArguments(
    output_dir="out/hugging_face",
    num_train_epochs=12,
    per_device_train_batch_size=20,
    learning_rate=3e-3,
    weight_decay=0.01,
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=train, data_collator=collate)
trainer.train()

# All weights, by the structure for large networks; the ridge is what the weight decay amounts to.
tracer = fit_trainer(trainer, structure="core", progress=False)
found = tracer.predict(trainer.get_eval_dataloader(test))
print(found)
print(tracer.explain(trainer.get_eval_dataloader(test)))
