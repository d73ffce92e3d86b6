"""What holds for every test: no network, one thread (tests run in two processes), no state between tests."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start, too

import torch

torch.set_num_threads(1)
