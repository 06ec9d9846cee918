"""Our reader and writer of protobuf's text format beside protobuf's own."""

from __future__ import annotations

import json
import random

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from utils.core.errors import InputError
from utils.serving import pbtxt

WHOLE = """
# a comment
name: "a" platform: 'tensorrt_plan'   # another
max_batch_size: 0x10,
input [ { name: "images", data_type: TYPE_FP32; dims: [ 3, -1, 640 ] format: FORMAT_NCHW },
        { name: "b" data_type: TYPE_INT8 dims: 3 dims: 4 } ]
output: { name: "o" data_type: TYPE_FP16 dims: [] label_filename: "l" "abels" ".txt" }
output < name: "p" dims: [2] >
instance_group { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] }
dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 100
  priority_queue_policy { key: 3 value { timeout_action: DELAY } } }
parameters: { key: "names" value: { string_value: "{\\"0\\": \\"caf\\303\\251 \\\\\\\\\\"}\\n" } }
parameters [ { key: "b" value { string_value: "\\x41\\u00e9\\t" } }, { key: "c" } ]
model_warmup { name: "w" batch_size: 1 inputs { key: "images" value { zero_data: true dims: [ 1 ] } } }
model_metrics { metric_control { histogram_options { buckets: [ 0.5, 1.5e1, 2f ] } } }
metric_tags { key: "k" value: "v" }
version_policy { all { } }
"""


def ours_as_theirs(message: dict, kind: type[ModelConfig] = ModelConfig) -> ModelConfig:
    """A dict of ours as a message of protobuf's, by its JSON."""
    return json_format.ParseDict(message, kind())


def test_reads_what_protobuf_reads():
    expected = text_format.Parse(WHOLE, ModelConfig())
    found = pbtxt.loads(WHOLE, "config.pbtxt")
    assert ours_as_theirs(found) == expected
    assert found["parameters"]["names"]["string_value"] == '{"0": "café \\\\"}\n'
    assert found["output"][0]["label_filename"] == "labels.txt"
    assert found["version_policy"] == {"all": {}}


def test_protobuf_reads_what_is_written():
    message = pbtxt.loads(WHOLE, "config.pbtxt")
    text = pbtxt.dumps(message)
    assert text_format.Parse(text, ModelConfig()) == ours_as_theirs(message)
    assert pbtxt.loads(text, "config.pbtxt") == message


@pytest.mark.parametrize(
    "name",
    ['"', "\\", '"} platform: "python', "a\nb", "\r\t\0", "é ü 漢 😀", "‮ abc", "\x1b[31m", "\\n", "'", "#", "",
     "\\\\", "\x85\u2028", '{"0": "\\"x\\""}'],
)  # fmt: skip
def test_a_name_of_somebody_else_stays_one_text(name):
    message = {"name": "m", "parameters": {name: {"string_value": name}}, "metric_tags": {"a": name}}
    text = pbtxt.dumps(message)
    found = text_format.Parse(text, ModelConfig())
    assert dict(found.metric_tags) == {"a": name}
    assert found.parameters[name].string_value == name
    assert found.platform == ""
    assert len(text.splitlines()) == len(pbtxt.dumps({"name": "m", "parameters": {"a": {"string_value": "b"}},
                                                      "metric_tags": {"a": "c"}}).splitlines())  # fmt: skip
    assert pbtxt.loads(text, "a") == message


def test_half_a_surrogate_pair_becomes_a_question_mark():
    assert json.loads('"\\ud800"') == "\ud800"
    text = pbtxt.dumps({"name": "a\ud800b"})
    assert text_format.Parse(text, ModelConfig()).name == "a?b"


def test_random_texts_come_back():
    rng = random.Random(0)
    for _ in range(200):
        name = "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(rng.randrange(12)))
        assert text_format.Parse(pbtxt.dumps({"name": name}), ModelConfig()).name == name
        assert pbtxt.loads(pbtxt.dumps({"name": name}), "a") == {"name": name}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "a"\nmax_batch: 4', "line 2: ModelConfig has no field max_batch; Triton refuses the file"),
        ('name: "a" name: "b"', "line 1: ModelConfig sets name twice"),
        ("name: a", "line 1: name is a; expected a text in quotes"),
        ('name "a"', "line 1: expected a colon behind name"),
        ('max_batch_size: "4"', "expected an integer"),
        ("max_batch_size: 4.5", "expected an integer"),
        (f"max_batch_size: {2**70}", "expected an integer"),
        (f"max_batch_size: {'9' * 5000}", "expected an integer"),
        ("input { data_type: FP32 }", "data_type is FP32; expected one of TYPE_INVALID, TYPE_BOOL"),
        ("input { is_shape_tensor: yes }", "expected true or false"),
        ('input { name: "a"', "line 1: found the end of the file; expected a field of Input or }"),
        ("input [ { } { } ]", "expected a comma or ] in input"),
        ("input: 3", "input is a message; expected {"),
        ("parameters: 3", "parameters is a map; expected { key: ... value: ... }"),
        ('parameters { key: "a" key: "b" }', "found key in an entry of parameters"),
        ('parameters { key "a" }', "expected a colon behind key"),
        ('name: "a\nb"', "is not protobuf's text format"),
        ('name: "\\377"', "is no text"),
        ("}", "found }; expected a field of ModelConfig"),
        ("[a.b] { }", "is not protobuf's text format"),
        ("\x00", "is not protobuf's text format"),
        ("dynamic_batching { } sequence_batching { }", "ModelConfig sets both dynamic_batching and sequence_batching"),
        ("model_warmup { inputs { value { zero_data: true random_data: true } } }", "both zero_data and random_data"),
        ("dynamic_batching", "dynamic_batching is a message; expected {"),
    ],
)
def test_what_protobuf_refuses_is_refused_in_one_line(text, message):
    with pytest.raises(text_format.ParseError):
        text_format.Parse(text, ModelConfig())
    with pytest.raises(InputError) as caught:
        pbtxt.loads(text, "m/config.pbtxt")
    assert message in str(caught.value)
    assert str(caught.value).startswith("m/config.pbtxt, line ")
    assert len(str(caught.value).splitlines()) == 1


def test_an_escape_that_only_protobufs_python_takes_is_refused():
    with pytest.raises(InputError, match="is no text: an escape is unknown"):
        pbtxt.loads('name: "\\q"', "config.pbtxt")


def test_no_field_is_written_that_triton_does_not_know():
    with pytest.raises(ValueError, match="Input has no field shape"):
        pbtxt.dumps({"input": [{"shape": [1]}]})
