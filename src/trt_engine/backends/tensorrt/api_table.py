"""The used API of TensorRT's Python bindings: name, parameters, releases. Imports nothing.

`binding` gates names by this table; tests compare it with the real bindings of the oldest and newest release of both
majors. A release is the first with (or without) a name, of 22 examined, 10.0.1 to 11.4.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiEntry:
    """One name of the bindings, below `tensorrt`."""

    name: str
    parameters: tuple[str, ...] | None = None
    """The parameters passed to a method, after `self`, by their published names. None for other entries."""
    since: str = "10.0"
    until: str | None = None
    """The first release without it."""

    def is_present(self, version: tuple[int, ...]) -> bool:
        """True when TensorRT of that version has the name."""
        return at_least(version, self.since) and not (self.until is not None and at_least(version, self.until))


def parse_release(text: str) -> tuple[int, ...]:
    """`10.13.3` as numbers."""
    return tuple(int(part) for part in text.split("."))


def at_least(version: tuple[int, ...], text: str) -> bool:
    """True when the version is that release or a later one."""
    return version >= parse_release(text)


def find_entry(name: str) -> ApiEntry:
    """The entry of a name; `KeyError` for a missing one: add it before use."""
    return _BY_NAME[name]


def _parse_table(text: str, first_release: str) -> tuple[ApiEntry, ...]:
    """The entries of `OWNER [since RELEASE] [until RELEASE]: name method(parameter,...) ...`; deeper lines continue one."""
    found = []
    for line in text.strip().replace("\n  ", " ").splitlines():
        head, _, names = line.partition(": ")
        owner, *releases = head.split()
        range_ = dict(zip(releases[::2], releases[1::2], strict=True))
        for name, call, given in re.findall(r"(\w+)(\(([\w,]*)\))?", names):
            found.append(
                ApiEntry(
                    name if owner == "module" else f"{owner}.{name}",
                    tuple(filter(None, given.split(","))) if call else None,
                    range_.get("since", first_release),
                    range_.get("until"),
                )
            )
    return tuple(found)


API_TABLE = _parse_table(
    """
module: __version__
Builder: __init__(logger) create_network(flags) create_builder_config() create_optimization_profile()
  build_serialized_network(network,config)
Builder since 10.13.3: build_serialized_network_to_stream(network,config,writer)
Builder: max_threads gpu_allocator num_DLA_cores
NetworkDefinitionCreationFlag: STRONGLY_TYPED
INetworkDefinition: get_input(index) get_output(index) get_flag(flag) num_inputs num_outputs num_layers
INetworkDefinition since 10.2: mark_weights_refittable(name)
ITensor: name dtype shape is_shape_tensor
IOptimizationProfile: set_shape(input,min,opt,max) set_shape_input(input,min,opt,max) get_shape(input)
  get_shape_input(input)
IBuilderConfig: add_optimization_profile(profile) set_flag(flag) clear_flag(flag) get_flag(flag)
  set_memory_pool_limit(pool,pool_size) get_memory_pool_limit(pool) create_timing_cache(serialized_timing_cache)
  set_timing_cache(cache,ignore_mismatch) get_timing_cache() set_tactic_sources(tactic_sources) get_tactic_sources()
  set_preview_feature(feature,enable) get_preview_feature(feature) builder_optimization_level max_aux_streams
  avg_timing_iterations profiling_verbosity progress_monitor hardware_compatibility_level plugins_to_serialize
  default_device_type DLA_core
IBuilderConfig since 10.2: runtime_platform
IBuilderConfig since 10.4: max_num_tactics
IBuilderConfig since 10.8: tiling_optimization_level l2_limit_for_tiling
IBuilderConfig since 11.1: build_route all_build_routes
BuilderFlag: TF32 REFIT REFIT_IDENTICAL STRIP_PLAN VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME WEIGHT_STREAMING
  SPARSE_WEIGHTS GPU_FALLBACK ERROR_ON_TIMING_CACHE_MISS DISABLE_COMPILATION_CACHE
BuilderFlag since 10.2: REFIT_INDIVIDUAL
BuilderFlag since 10.6: STRICT_NANS
BuilderFlag since 10.8: EDITABLE_TIMING_CACHE
BuilderFlag since 10.12: DISTRIBUTIVE_INDEPENDENCE
MemoryPoolType: WORKSPACE TACTIC_DRAM TACTIC_SHARED_MEMORY DLA_MANAGED_SRAM DLA_LOCAL_DRAM DLA_GLOBAL_DRAM
TacticSource: EDGE_MASK_CONVOLUTIONS JIT_CONVOLUTIONS
TacticSource until 11.0: CUBLAS CUBLAS_LT CUDNN
PreviewFeature until 11.0: PROFILE_SHARING_0806
PreviewFeature since 10.3: ALIASED_PLUGIN_IO_10_03
PreviewFeature since 10.10: RUNTIME_ACTIVATION_RESIZE_10_10
PreviewFeature since 10.16 until 11.0: MULTIDEVICE_RUNTIME_10_16
HardwareCompatibilityLevel: NONE AMPERE_PLUS
HardwareCompatibilityLevel since 10.9: SAME_COMPUTE_CAPABILITY
RuntimePlatform since 10.2: WINDOWS_AMD64
ProfilingVerbosity: DETAILED LAYER_NAMES_ONLY NONE
TilingOptimizationLevel since 10.8: NONE FAST MODERATE FULL
DeviceType: DLA
ITimingCache: combine(input_cache,ignore_mismatch) serialize()
OnnxParser: __init__(network,logger) parse(model,path) get_error(index) num_errors
OnnxParser since 10.15: set_builder_config(builder_config)
OnnxParser: get_used_vc_plugin_libraries()
ParserError: code() desc() file() func() node() node_name() node_operator() local_function_stack()
ILogger: __init__() log(severity,msg)
ILogger.Severity: INTERNAL_ERROR ERROR WARNING INFO VERBOSE
IProgressMonitor: __init__() phase_start(phase_name,parent_phase,num_steps) step_complete(phase_name,step)
  phase_finish(phase_name)
IGpuAsyncAllocator: __init__() allocate_async(size,alignment,flags,stream) deallocate_async(memory,stream)
IGpuAllocator: allocate(size,alignment,flags) deallocate(memory) reallocate(address,alignment,new_size)
IStreamWriter since 10.13.3: __init__() write(data,size)
IStreamReaderV2 since 10.7: __init__() read(destination,num_bytes,stream) seek(offset,where)
IOutputAllocator: __init__()
IProfiler: __init__() report_layer_time(layer_name,ms)
module: init_libnvinfer_plugins(logger,namespace) get_plugin_registry()
IPluginRegistry: load_library(plugin_path) all_creators
Refitter: __init__(engine,logger) get_missing_weights() refit_cuda_engine()
Refitter since 11.4: release_refit_resources()
OnnxParserRefitter: __init__(refitter,logger) refit_from_bytes(model,path) get_error(index) num_errors
Runtime: __init__(logger) deserialize_cuda_engine(serialized_engine) load_runtime(path) engine_host_code_allowed
  gpu_allocator DLA_core num_DLA_cores
ICudaEngine: num_io_tensors num_layers num_optimization_profiles num_aux_streams refittable streamable_weights_size
ICudaEngine since 10.1: device_memory_size_v2 weight_streaming_budget_v2
ICudaEngine until 11.0: device_memory_size
ICudaEngine since 10.1: get_weight_streaming_automatic_budget()
ICudaEngine: get_tensor_name(index) get_tensor_mode(name) get_tensor_dtype(name) get_tensor_shape(name)
  get_tensor_location(name) get_tensor_profile_shape(name,profile_index) get_tensor_profile_values(name,profile_index)
  create_engine_inspector() create_execution_context(strategy)
EngineInspector: get_engine_information(format) get_layer_information(layer_index,format) execution_context
LayerInformationFormat: JSON
ExecutionContextAllocationStrategy: STATIC ON_PROFILE_CHANGE USER_MANAGED
TensorIOMode: INPUT
TensorLocation: HOST
DataType: FLOAT HALF BF16 INT8 INT32 INT64 UINT8 BOOL FP8 INT4
DataType since 10.8: FP4
DataType since 10.12: E8M0
IExecutionContext: set_input_shape(name,shape) get_tensor_shape(name) set_tensor_address(name,memory)
  set_output_allocator(name,output_allocator) get_max_output_size(name) infer_shapes() execute_async_v3(stream_handle)
  set_optimization_profile_async(profile_index,stream_handle) update_device_memory_size_for_shapes()
  report_to_profiler()
IExecutionContext since 10.1: set_device_memory(memory,size)
IExecutionContext: device_memory active_optimization_profile enqueue_emits_profile profiler persistent_cache_limit
""",
    "10.0",
)
_BY_NAME: dict[str, ApiEntry] = {use.name: use for use in API_TABLE}


# ------------------------------------------------------------------------------------------------ TensorRT-RTX

RTX_MISSING: frozenset[str] = frozenset({"IGpuAllocator.allocate", "IGpuAllocator.deallocate"})
"""Names of `SURFACE` missing in TensorRT-RTX, besides those removed in TensorRT 11.0."""
RTX_API_TABLE = _parse_table(
    """
ComputeCapability: SM75 SM80 SM86 SM89 SM120 SM121
IBuilderConfig: num_compute_capabilities set_compute_capability(compute_capability,index)
  get_compute_capability(index)
BuilderFlag: REQUIRE_USER_ALLOCATION
Runtime: get_engine_validity(buffer) engine_header_size defer_weights_loading
ILogger: VERBOSE
ICudaEngine: weights_loaded load_weights(blob) create_runtime_config()
IExecutionContext: is_stream_capturable(stream)
IRuntimeConfig: cuda_graph_strategy dynamic_shapes_kernel_specialization_strategy
  set_execution_context_allocation_strategy(strategy) create_runtime_cache() set_runtime_cache(cache)
IRuntimeCache: serialize() deserialize(blob)
CudaGraphStrategy: DISABLED WHOLE_GRAPH_CAPTURE
DynamicShapesKernelSpecializationStrategy: LAZY EAGER NONE
""",
    "1.7",
)
"""Names of TensorRT-RTX alone, by its releases."""
