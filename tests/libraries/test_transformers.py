"""transformers: `Trainer.train` with a tiny model that is made from its configuration."""

from __future__ import annotations

from .protocol import Protocol

CELL = """
import tempfile
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Sentences(Samples):
    def __getitem__(self, index):
        pass_through(index)
        words = torch.randint(0, 32, (6,))  # other words each time: workers are seeded
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": torch.tensor(index % 2)}

class Keep(Trainer):
    def compute_loss(self, *arguments, **options):
        loss = super().compute_loss(*arguments, **options)
        step(loss[0] if isinstance(loss, tuple) else loss)
        return loss

def make():
    return Sentences()

def make_trainer(dataset):
    seed()
    model = BertForSequenceClassification(BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    ))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, dataloader_num_workers=2, per_device_train_batch_size=BATCH,
        num_train_epochs=2, save_strategy="no", report_to=[], seed=0,
    )
    return Keep(model=model, args=arguments, train_dataset=dataset)

def train(dataset):
    make_trainer(dataset).train()
"""


class TestTrainer(Protocol):
    cell = CELL
    batches = "iter(make_trainer(made).get_train_dataloader())"
