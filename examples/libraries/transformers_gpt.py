"""A language model of transformers that computes its loss itself, with the collator that makes its
labels.

python transformers_gpt.py
allhands launch -n 2 transformers_gpt.py
"""

import argparse

import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import allhands


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Numbers from 0 to 19; where there is a hub: AutoTokenizer.from_pretrained("…")."""
    vocabulary = {"[PAD]": 0} | {str(number): number + 1 for number in range(20)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")


def counting(samples: int, seed: int) -> list[dict]:
    """Sequences of 4 to 16 tokens, each of which counts on from a number in steps of 1, 2 or 3."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(samples):
        first, step, length = (
            int(torch.randint(low, high, (), generator=generator))
            for low, high in ((0, 20), (1, 4), (4, 17))
        )
        rows.append({"input_ids": [1 + (first + step * place) % 20 for place in range(length)]})
    return rows


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=21, n_positions=16, n_embd=32, n_layer=2, n_head=2, **dropout)
    )


def train(batch_size: int = 16, samples: int = 512, epochs: int = 3, **options):
    """Train on sequences of different lengths. `batch_size` is that of one worker."""
    collate = DataCollatorForLanguageModeling(build_tokenizer(), mlm=False)
    model = build_model()
    # The model is given the labels, too, and computes its loss.
    keys = ["input_ids", "attention_mask", "labels"]
    runner = allhands.SupervisedRunner(model, input_key=keys, target_key="labels")
    history = runner.train(
        # A mean over all labels but the first of each sequence and the padding, which is -100.
        criterion=allhands.ModelLoss(shift=True),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loaders={
            "train": DataLoader(counting(samples, 1), batch_size, True, collate_fn=collate),
            "valid": DataLoader(counting(53, 2), batch_size, collate_fn=collate),
        },
        num_epochs=epochs,
        **options,
    )
    return model, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=512)
    _, history = train(samples=parser.parse_args().samples)
    print("validation loss:", history["valid"]["loss"][-1])
