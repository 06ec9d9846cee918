"""In the place of `BuildProcess`: builds in this process, where stand-ins are, with a clock of its own."""

from __future__ import annotations

from utils.core.errors import QatError
from utils.trt.build import build
from utils.trt.tune import BuildProcess, BuildTimeout


class Here(BuildProcess):
    """Builds in this process; each build takes `seconds` on its own clock, and those in `endless` their limit."""

    now = 0.0

    def __init__(self, seconds=10.0, endless=(), failing=()):
        super().__init__()
        self.seconds, self.endless, self.failing = seconds, endless, failing
        self.asked = []  # options and limit

    def build(self, onnx, engine, config, limit):
        self.asked.append((config.options, limit))
        late = config.options in self.endless or limit < self.seconds
        Here.now += limit if late else self.seconds
        if late:
            raise BuildTimeout(f"not built within {limit:.0f} s")
        if config.options in self.failing:
            raise QatError("no engine for this")
        return build(onnx, engine, config)

    def options(self):
        return [options for options, _ in self.asked]
