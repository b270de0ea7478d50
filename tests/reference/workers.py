"""The base of the references: workers whose messages are averaged, and momentum SGD on the mean. numpy, fp32."""

import numpy as np


class Workers:
    """Weights, and `workers` workers who each send something of every tensor in `compressed`, as a subclass says.

    `closest` is the smallest distance of any number from where it would be treated otherwise (a sign, a threshold, the
    k-th largest). A run whose numbers differ by less has treated all of them alike.
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
        compensated = {name: self.residual[worker][name] + gradient[name] for name in self.compressed}
        sent = self.lossy(compensated)
        self.residual[worker] = {name: compensated[name] - sent[name] for name in self.compressed}
        return sent

    def lossy(self, compensated):
        """Name -> what is sent of name -> array; here by a subclass's `quantise`, of each tensor by itself."""
        return {name: self.quantise(v) for name, v in compensated.items()}

    def mean(self, arrays):
        """The average over the workers, summed in rank order."""
        return sum(arrays) / np.float32(self.workers)

    def decided(self, distances):
        """Record how far numbers were from being treated otherwise."""
        self.closest = min(self.closest, float(np.min(distances)))
