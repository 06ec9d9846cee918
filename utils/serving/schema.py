"""The fields of Triton's ModelConfig, as `model_config.proto` of triton-inference-server/common has them.

A server refuses a config.pbtxt with a field that it does not know, so the check has to know them all. The table is
compared with tritonclient's compiled file in the tests. A field is `name:kind`, where the kind is `str`, `int`,
`float`, `bool`, a message or an enum; `*` behind it: repeated; braces around it: a map from texts (`!`: from integers).
"""

from __future__ import annotations

from dataclasses import dataclass

ROOT = "ModelConfig"
_MESSAGES = """
ModelConfig name:str platform:str backend:str runtime:str version_policy:VersionPolicy max_batch_size:int input:Input*
 output:Output* batch_input:BatchInput* batch_output:BatchOutput* optimization:Optimization
 dynamic_batching:DynamicBatching sequence_batching:SequenceBatching ensemble_scheduling:Ensembling
 instance_group:InstanceGroup* default_model_filename:str cc_model_filenames:{str} metric_tags:{str}
 parameters:{Parameter} model_warmup:Warmup* model_operations:Operations
 model_transaction_policy:TransactionPolicy model_repository_agents:Agents response_cache:ResponseCache
 model_metrics:Metrics
VersionPolicy latest:Latest all:All specific:Specific
Latest num_versions:int
All
Specific versions:int*
Reshape shape:int*
Input name:str data_type:DataType format:Format dims:int* reshape:Reshape is_shape_tensor:bool allow_ragged_batch:bool
 optional:bool is_non_linear_format_io:bool
Output name:str data_type:DataType dims:int* reshape:Reshape label_filename:str is_shape_tensor:bool
 is_non_linear_format_io:bool
BatchInput kind:InputKind target_name:str* data_type:DataType source_input:str*
BatchOutput target_name:str* kind:OutputKind source_input:str*
Graph level:int
Shape dim:int*
LowerBound batch_size:int input:{Shape}
GraphSpec batch_size:int input:{Shape} graph_lower_bound:LowerBound
Cuda graphs:bool busy_wait_events:bool graph_spec:GraphSpec* output_copy_stream:bool
Accelerator name:str parameters:{str}
Accelerators gpu_execution_accelerator:Accelerator* cpu_execution_accelerator:Accelerator*
PinnedMemory enable:bool
Optimization graph:Graph priority:Priority cuda:Cuda execution_accelerators:Accelerators
 input_pinned_memory:PinnedMemory output_pinned_memory:PinnedMemory gather_kernel_buffer_threshold:int
 eager_batching:bool
QueuePolicy timeout_action:TimeoutAction default_timeout_microseconds:int allow_timeout_override:bool max_queue_size:int
DynamicBatching preferred_batch_size:int* max_queue_delay_microseconds:int preserve_ordering:bool priority_levels:int
 default_priority_level:int default_queue_policy:QueuePolicy priority_queue_policy:{QueuePolicy}!
Direct max_queue_delay_microseconds:int minimum_slot_utilization:float
Oldest max_candidate_sequences:int preferred_batch_size:int* max_queue_delay_microseconds:int preserve_ordering:bool
Control kind:ControlKind int32_false_true:int* fp32_false_true:float* bool_false_true:bool* data_type:DataType
ControlInput name:str control:Control*
InitialState data_type:DataType dims:int* zero_data:bool data_file:str name:str
State input_name:str output_name:str data_type:DataType dims:int* initial_state:InitialState*
 use_same_buffer_for_input_output:bool use_growable_memory:bool
SequenceBatching direct:Direct oldest:Oldest max_sequence_idle_microseconds:int control_input:ControlInput*
 state:State* iterative_sequence:bool
Step model_name:str model_version:int input_map:{str} output_map:{str} model_namespace:str
Ensembling step:Step* max_inflight_requests:int
Resource name:str global:bool count:int
RateLimiter resources:Resource* priority:int
SecondaryDevice kind:SecondaryDeviceKind device_id:int
InstanceGroup name:str kind:InstanceKind count:int rate_limiter:RateLimiter gpus:int* secondary_devices:SecondaryDevice*
 profile:str* passive:bool host_policy:str
Parameter string_value:str
WarmupInput data_type:DataType dims:int* zero_data:bool random_data:bool input_data_file:str
Warmup name:str batch_size:int inputs:{WarmupInput} count:int
Operations op_library_filename:str*
TransactionPolicy decoupled:bool
Agent name:str parameters:{str}
Agents agents:Agent*
ResponseCache enable:bool
MetricIdentifier family:str
HistogramOptions buckets:float*
MetricControl metric_identifier:MetricIdentifier histogram_options:HistogramOptions
Metrics metric_control:MetricControl*
"""
_ENUMS = """
DataType TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32
 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16
Format FORMAT_NONE FORMAT_NHWC FORMAT_NCHW
InstanceKind KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL
SecondaryDeviceKind KIND_NVDLA
InputKind BATCH_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO
 BATCH_MAX_ELEMENT_COUNT_AS_SHAPE BATCH_ITEM_SHAPE BATCH_ITEM_SHAPE_FLATTEN
OutputKind BATCH_SCATTER_WITH_INPUT_SHAPE
Priority PRIORITY_DEFAULT PRIORITY_MAX PRIORITY_MIN
TimeoutAction REJECT DELAY
ControlKind CONTROL_SEQUENCE_START CONTROL_SEQUENCE_READY CONTROL_SEQUENCE_END CONTROL_SEQUENCE_CORRID
"""
# Of these fields a message sets one at most.
ONE_OF: dict[str, tuple[str, ...]] = {
    "ModelConfig": ("dynamic_batching", "sequence_batching", "ensemble_scheduling"),
    "VersionPolicy": ("latest", "all", "specific"),
    "SequenceBatching": ("direct", "oldest"),
    "InitialState": ("zero_data", "data_file"),
    "WarmupInput": ("zero_data", "random_data", "input_data_file"),
}


@dataclass(frozen=True)
class Field:
    """What a field holds: `kind` as in the table above; `keys` is the kind of a map's keys, '' for what is no map."""

    kind: str
    repeated: bool = False
    keys: str = ""


def _field(text: str) -> Field:
    if text.startswith("{"):
        kind, _, integers = text[1:].partition("}")
        return Field(kind, True, "int" if integers else "str")
    return Field(text.rstrip("*"), text.endswith("*"))


def _lines(table: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in table.strip().replace("\n ", " ").splitlines() if (words := line.split())}


MESSAGES: dict[str, dict[str, Field]] = {
    name: {key: _field(text) for key, _, text in (word.partition(":") for word in words)}
    for name, words in _lines(_MESSAGES).items()
}
ENUMS: dict[str, tuple[str, ...]] = {name: tuple(words) for name, words in _lines(_ENUMS).items()}
