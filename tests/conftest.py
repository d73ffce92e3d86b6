"""What holds for every test: no network, one thread (tests run in two processes), no state between tests.

Kernels run through Triton's interpreter where there is no GPU, which has to be said before triton is first imported.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"  # of programs that tests start, too

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
