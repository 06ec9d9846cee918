"""The table of fields beside tritonclient's compiled model_config.proto."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from tritonclient.grpc import model_config_pb2

from utils.serving.schema import ENUMS, MESSAGES, ONE_OF, ROOT, Field

SCALARS = {
    FieldDescriptor.TYPE_STRING: "str", FieldDescriptor.TYPE_BOOL: "bool", FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_DOUBLE: "float", FieldDescriptor.TYPE_INT32: "int", FieldDescriptor.TYPE_UINT32: "int",
    FieldDescriptor.TYPE_INT64: "int", FieldDescriptor.TYPE_UINT64: "int",
}  # fmt: skip


def is_repeated(field: FieldDescriptor) -> bool:
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def compare(name: str, message: Descriptor, seen: dict[str, Descriptor]) -> None:
    """A message of ours and protobuf's, and what they are made of."""
    if name in seen:
        assert seen[name] is message, name
        return
    seen[name] = message
    choices = [tuple(field.name for field in choice.fields) for choice in message.oneofs if len(choice.fields) > 1]
    assert choices == ([ONE_OF[name]] if name in ONE_OF else []), name
    assert set(MESSAGES[name]) == {field.name for field in message.fields}, name
    for field in message.fields:
        own, inner = MESSAGES[name][field.name], field
        entry = field.message_type if field.type == field.TYPE_MESSAGE else None
        if entry is not None and entry.GetOptions().map_entry:
            assert own.keys == SCALARS[entry.fields_by_name["key"].type], (name, field.name)
            inner = entry.fields_by_name["value"]
        else:
            assert own.keys == "", (name, field.name)
        assert own.repeated == is_repeated(field), (name, field.name)
        if inner.type == inner.TYPE_MESSAGE:
            compare(own.kind, inner.message_type, seen)
        elif inner.type == inner.TYPE_ENUM:
            enum: EnumDescriptor = inner.enum_type
            assert list(ENUMS[own.kind]) == [value.name for value in enum.values], (name, field.name)
        else:
            assert own.kind == SCALARS[inner.type], (name, field.name)


def test_every_field_of_the_proto_is_known_and_no_other():
    seen: dict[str, Descriptor] = {}
    compare(ROOT, model_config_pb2.ModelConfig.DESCRIPTOR, seen)
    assert set(seen) == set(MESSAGES)
    used = {field.kind for fields in MESSAGES.values() for field in fields.values()}
    assert set(ENUMS) <= used


def test_fields_are_read_from_the_table():
    assert MESSAGES["ModelConfig"]["input"] == Field("Input", repeated=True)
    assert MESSAGES["ModelConfig"]["parameters"] == Field("Parameter", repeated=True, keys="str")
    assert MESSAGES["DynamicBatching"]["priority_queue_policy"] == Field("QueuePolicy", repeated=True, keys="int")
    assert MESSAGES["Warmup"]["batch_size"] == Field("int")
