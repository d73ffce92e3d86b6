"""What holds for every test: no network, one thread (tiny tensors get slower with more), no state between tests."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import torch

torch.set_num_threads(1)
