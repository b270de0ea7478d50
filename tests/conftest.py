"""One thread a rank: tests with several ranks would otherwise fight for the cores, and sums stay in one order."""

import torch

torch.set_num_threads(1)
