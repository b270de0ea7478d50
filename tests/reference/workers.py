"""What the references share: workers whose messages are averaged, and momentum SGD on that. Plain numpy, fp32."""

import numpy as np


class Workers:
    """Weights, and `workers` workers who each send something of every tensor in `compressed`, as a subclass says.

    `closest` is the smallest distance that any number had from the edge of a decision (a sign, a threshold, the k-th
    place): a run that differs by less than it has decided everything in the same way.
    """

    def __init__(self, weights, compressed, workers, *, lr, momentum):
        self.weights = {name: np.array(weight, dtype=np.float32) for name, weight in weights.items()}
        self.compressed, self.workers = list(compressed), workers
        self.lr, self.m = np.float32(lr), np.float32(momentum)
        self.momentum = {name: np.zeros_like(weight) for name, weight in self.weights.items()}
        self.residual = [{name: np.zeros_like(self.weights[name]) for name in self.compressed} for _ in range(workers)]
        self.closest = np.inf

    def step(self, gradients):
        """One step from the workers' own gradients, a list of name -> array."""
        averages = self.averages(gradients)
        for name in self.weights:
            average = averages[name] if name in self.compressed else self.mean([g[name] for g in gradients])
            self.momentum[name] = self.m * self.momentum[name] + average
            self.weights[name] -= self.lr * self.momentum[name]

    def averages(self, gradients):
        """Name -> average of what the workers send, for the tensors in `compressed`."""
        sent = [self.send(worker, gradient) for worker, gradient in enumerate(gradients)]
        return {name: self.mean([each[name] for each in sent]) for name in self.compressed}

    def send(self, worker, gradient):
        """Error feedback: a lossy copy of residual + gradient is sent, and what it lacks is the next residual."""
        owed = {name: self.residual[worker][name] + gradient[name] for name in self.compressed}
        sent = self.lossy(owed)
        self.residual[worker] = {name: owed[name] - sent[name] for name in self.compressed}
        return sent

    def lossy(self, owed):
        """Name -> what is sent of name -> array, for a worker that sends each tensor by itself."""
        return {name: self.quantise(v) for name, v in owed.items()}

    def quantise(self, v):
        """What is sent of one tensor."""
        raise NotImplementedError

    def mean(self, arrays):
        """The average over the workers, summed in rank order."""
        return sum(arrays) / np.float32(self.workers)

    def decided(self, distances):
        """Take note of how far numbers were from being decided otherwise."""
        self.closest = min(self.closest, float(np.min(distances)))
