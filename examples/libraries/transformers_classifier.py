"""A classifier of transformers, with its tokenizer and collator: is there more sun than rain?

python transformers_classifier.py
allhands launch -n 2 transformers_classifier.py
"""

import argparse

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

import allhands

WORDS = ["[PAD]", "[UNK]", "sun", "rain", "and", "wind"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Where there is a hub: AutoTokenizer.from_pretrained("…")."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def texts(tokenizer, samples: int, seed: int) -> list[dict]:
    """Tokenized texts of 3 to 12 words, with the label 1 where there is more sun than rain."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(samples):
        length = int(torch.randint(3, 13, (), generator=generator))
        numbers = torch.randint(2, len(WORDS), (length,), generator=generator).tolist()
        words = [WORDS[number] for number in numbers]
        label = int(words.count("sun") > words.count("rain"))
        rows.append({**tokenizer(" ".join(words)), "label": label})
    return rows


def build_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(WORDS), num_labels=2, **sizes, **layers, **dropout)
    return BertForSequenceClassification(config)


def train(batch_size: int = 16, samples: int = 512, epochs: int = 3, **options):
    """Train, and predict the logits of the validation texts. `batch_size` is that of one worker."""
    tokenizer = build_tokenizer()
    pad = DataCollatorWithPadding(tokenizer)
    loaders = {
        "train": DataLoader(texts(tokenizer, samples, 1), batch_size, True, collate_fn=pad),
        "valid": DataLoader(texts(tokenizer, 101, 2), batch_size, collate_fn=pad),
    }
    model = build_model()
    # The batch has the labels as "labels"; the output has the logits as "logits".
    keys = {"input_key": ["input_ids", "attention_mask"], "target_key": "labels"}
    runner = allhands.SupervisedRunner(model, output_key="logits", **keys)
    history = runner.train(
        criterion=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loaders=loaders,
        metrics=["accuracy"],
        num_epochs=epochs,
        **options,
    )
    return model, history, runner.predict(loader=loaders["valid"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=512)
    _, history, logits = train(samples=parser.parse_args().samples)
    print("accuracy:", history["valid"]["accuracy"][-1], "logits:", list(logits.shape))
