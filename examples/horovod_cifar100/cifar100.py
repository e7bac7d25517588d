"""CIFAR-100 from the folder that ALLHANDS_DATA names, else as Keras downloads it."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from allhands.data import catalogue


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """What `tf.keras.datasets.cifar100.load_data()` gives: uint8 images N x 32 x 32 x 3 and fine
    labels N x 1, train and test."""
    if not os.environ.get("ALLHANDS_DATA"):
        return tf.keras.datasets.cifar100.load_data()
    return _part("train"), _part("test")


def _part(split: str) -> tuple[np.ndarray, np.ndarray]:
    images, labels = catalogue.load("cifar100", split, dtype="uint8").tensors
    return images.numpy().transpose(0, 2, 3, 1), labels.numpy()[:, None]
