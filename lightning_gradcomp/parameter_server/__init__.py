"""dist_async: workers push gradients to servers and pull weights, without waiting for one another.

`partition.py`, `worker.py` and `clocks.py` hold the rules, without networking; `connection.py` and `messages.py` the
transport; `server.py` and `averager.py` the two ends. Uses torch.distributed through `averaging/`, but not Lightning.
"""
