"""In the place of `BuildProcess`: builds in this process, where stand-ins are, with a clock of its own."""

from __future__ import annotations

from utils.core.errors import QatError
from utils.trt.builder import build
from utils.trt.tune import BuildProcess, Outcome


class Here(BuildProcess):
    """Builds in this process; each build takes `seconds` on its own clock, and those in `endless` their limit."""

    now = 0.0

    def __init__(self, seconds=10.0, endless=(), failing=()):
        super().__init__()
        self.seconds, self.endless, self.failing = seconds, endless, failing
        self.asked = []  # options and limit

    def build(self, onnx, engine, config, limit, on_wait=lambda: None):
        self.asked.append((config.options, limit))
        late = config.options in self.endless or limit < self.seconds
        Here.now += limit if late else self.seconds
        on_wait()
        if late:
            return Outcome(limit, f"not built within {limit:.0f} s", 1, late=True)
        if config.options in self.failing:
            return Outcome(self.seconds, "no engine for this", 1)
        try:
            build(onnx, engine, config)
        except QatError as error:
            return Outcome(self.seconds, str(error), error.exit_code)
        return Outcome(self.seconds, "", 0)

    def options(self):
        return [options for options, _ in self.asked]
