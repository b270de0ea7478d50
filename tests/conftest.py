"""Settings for tests with several ranks, which share few cores."""

import sys

import torch

torch.set_num_threads(1)  # ranks would otherwise fight for the cores, and sums stay in one order
sys.setswitchinterval(5e-4)  # one that comes back from an exchange then soon gets its turn, where ranks are threads
