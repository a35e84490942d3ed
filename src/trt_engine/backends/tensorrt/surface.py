"""What the backend uses of TensorRT's Python bindings: name, parameters, the releases that have it. Imports nothing.

The table is the one source: `compat` gates names by it, and the tests hold it against the real bindings of both ends of
both majors. A release is the first (or the first without) of the 22 that were looked into, 10.0.1 to 11.4.0.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SURFACE", "Use", "at_least", "find", "release"]


@dataclass(frozen=True, slots=True)
class Use:
    """One name of the bindings, below `tensorrt`."""

    name: str
    parameters: tuple[str, ...] | None = None
    """Of a method: those we pass, after `self`, by the names the bindings publish. None for what is no method."""
    since: str = "10.0"
    until: str | None = None
    """The first release without it."""

    def present(self, version: tuple[int, ...]) -> bool:
        """True when TensorRT of that version has the name."""
        return at_least(version, self.since) and not (self.until is not None and at_least(version, self.until))


def release(text: str) -> tuple[int, ...]:
    """`10.13.3` as numbers."""
    return tuple(int(part) for part in text.split("."))


def at_least(version: tuple[int, ...], text: str) -> bool:
    """True when the version is that release or a later one."""
    return version >= release(text)


def find(name: str) -> Use:
    """The entry of a name; `KeyError` for one the table lacks: it belongs there before it is used."""
    return _BY_NAME[name]


def _methods(owner: str, table: dict[str, str], since: str = "10.0", until: str | None = None) -> tuple[Use, ...]:
    return tuple(Use(f"{owner}.{name}", tuple(given.split()), since, until) for name, given in table.items())


def _names(owner: str, names: str, since: str = "10.0", until: str | None = None) -> tuple[Use, ...]:
    return tuple(Use(f"{owner}.{name}", None, since, until) for name in names.split())


SURFACE: tuple[Use, ...] = (
    Use("__version__"),
    # -------------------------------------------------------------------------------- building
    *_methods(
        "Builder",
        {
            "__init__": "logger",
            "create_network": "flags",
            "create_builder_config": "",
            "create_optimization_profile": "",
            "build_serialized_network": "network config",
        },
    ),
    Use("Builder.build_serialized_network_to_stream", ("network", "config", "writer"), "10.13.3"),
    *_names("Builder", "max_threads gpu_allocator num_DLA_cores"),
    *_names("NetworkDefinitionCreationFlag", "STRONGLY_TYPED"),
    *_methods("INetworkDefinition", {"get_input": "index", "get_output": "index", "get_flag": "flag"}),
    *_names("INetworkDefinition", "num_inputs num_outputs num_layers"),
    Use("INetworkDefinition.mark_weights_refittable", ("name",), "10.2"),
    *_names("ITensor", "name dtype shape is_shape_tensor"),
    *_methods(
        "IOptimizationProfile",
        {
            "set_shape": "input min opt max",
            "set_shape_input": "input min opt max",
            "get_shape": "input",
            "get_shape_input": "input",
        },
    ),
    *_methods(
        "IBuilderConfig",
        {
            "add_optimization_profile": "profile",
            "set_flag": "flag",
            "clear_flag": "flag",
            "get_flag": "flag",
            "set_memory_pool_limit": "pool pool_size",
            "get_memory_pool_limit": "pool",
            "create_timing_cache": "serialized_timing_cache",
            "set_timing_cache": "cache ignore_mismatch",
            "get_timing_cache": "",
            "set_tactic_sources": "tactic_sources",
            "get_tactic_sources": "",
            "set_preview_feature": "feature enable",
            "get_preview_feature": "feature",
        },
    ),
    *_names(
        "IBuilderConfig",
        "builder_optimization_level max_aux_streams avg_timing_iterations profiling_verbosity progress_monitor "
        "hardware_compatibility_level plugins_to_serialize default_device_type DLA_core",
    ),
    *_names("IBuilderConfig", "runtime_platform", "10.2"),
    *_names("IBuilderConfig", "max_num_tactics", "10.4"),
    *_names("IBuilderConfig", "tiling_optimization_level l2_limit_for_tiling", "10.8"),
    *_names("IBuilderConfig", "build_route all_build_routes", "11.1"),
    *_names(
        "BuilderFlag",
        "TF32 REFIT REFIT_IDENTICAL STRIP_PLAN VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME WEIGHT_STREAMING SPARSE_WEIGHTS "
        "GPU_FALLBACK ERROR_ON_TIMING_CACHE_MISS DISABLE_COMPILATION_CACHE",
    ),
    *_names("BuilderFlag", "REFIT_INDIVIDUAL", "10.2"),
    *_names("BuilderFlag", "STRICT_NANS", "10.6"),
    *_names("BuilderFlag", "EDITABLE_TIMING_CACHE", "10.8"),
    *_names("BuilderFlag", "DISTRIBUTIVE_INDEPENDENCE", "10.12"),
    *_names(
        "MemoryPoolType",
        "WORKSPACE TACTIC_DRAM TACTIC_SHARED_MEMORY DLA_MANAGED_SRAM DLA_LOCAL_DRAM DLA_GLOBAL_DRAM",
    ),
    *_names("TacticSource", "EDGE_MASK_CONVOLUTIONS JIT_CONVOLUTIONS"),
    *_names("TacticSource", "CUBLAS CUBLAS_LT CUDNN", until="11.0"),
    *_names("PreviewFeature", "PROFILE_SHARING_0806", until="11.0"),
    *_names("PreviewFeature", "ALIASED_PLUGIN_IO_10_03", "10.3"),
    *_names("PreviewFeature", "RUNTIME_ACTIVATION_RESIZE_10_10", "10.10"),
    *_names("PreviewFeature", "MULTIDEVICE_RUNTIME_10_16", "10.16", "11.0"),
    *_names("HardwareCompatibilityLevel", "NONE AMPERE_PLUS"),
    *_names("HardwareCompatibilityLevel", "SAME_COMPUTE_CAPABILITY", "10.9"),
    *_names("RuntimePlatform", "WINDOWS_AMD64", "10.2"),
    *_names("ProfilingVerbosity", "DETAILED LAYER_NAMES_ONLY NONE"),
    *_names("TilingOptimizationLevel", "NONE FAST MODERATE FULL", "10.8"),
    *_names("DeviceType", "DLA"),
    *_methods("ITimingCache", {"combine": "input_cache ignore_mismatch", "serialize": ""}),
    # -------------------------------------------------------------------------------- ONNX
    *_methods("OnnxParser", {"__init__": "network logger", "parse": "model path", "get_error": "index"}),
    *_names("OnnxParser", "num_errors"),
    Use("OnnxParser.set_builder_config", ("builder_config",), "10.15"),
    Use("OnnxParser.get_used_vc_plugin_libraries", ()),
    *_methods(
        "ParserError",
        {"code": "", "desc": "", "node": "", "node_name": "", "node_operator": "", "local_function_stack": ""},
    ),
    # -------------------------------------------------------------------------------- callbacks
    Use("ILogger.__init__", ()),
    Use("ILogger.log", ("severity", "msg")),
    *_names("ILogger.Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE"),
    Use("IProgressMonitor.__init__", ()),
    *_methods(
        "IProgressMonitor",
        {
            "phase_start": "phase_name parent_phase num_steps",
            "step_complete": "phase_name step",
            "phase_finish": "phase_name",
        },
    ),
    Use("IGpuAsyncAllocator.__init__", ()),
    *_methods(
        "IGpuAsyncAllocator",
        {"allocate_async": "size alignment flags stream", "deallocate_async": "memory stream"},
    ),
    *_methods(
        "IGpuAllocator",
        {
            "allocate": "size alignment flags",
            "deallocate": "memory",
            "reallocate": "address alignment new_size",
        },
    ),
    Use("IStreamWriter.__init__", (), "10.13.3"),
    Use("IStreamWriter.write", ("data", "size"), "10.13.3"),
    Use("IStreamReaderV2.__init__", (), "10.7"),
    *_methods("IStreamReaderV2", {"read": "destination num_bytes stream", "seek": "offset where"}, "10.7"),
    Use("IOutputAllocator.__init__", ()),
    Use("IProfiler.__init__", ()),
    Use("IProfiler.report_layer_time", ("layer_name", "ms")),
    # -------------------------------------------------------------------------------- plugins
    Use("init_libnvinfer_plugins", ("logger", "namespace")),
    Use("get_plugin_registry", ()),
    *_methods("IPluginRegistry", {"load_library": "plugin_path"}),
    *_names("IPluginRegistry", "all_creators"),
    # -------------------------------------------------------------------------------- putting weights back
    Use("Refitter.__init__", ("engine", "logger")),
    *_methods("Refitter", {"get_missing_weights": "", "refit_cuda_engine": ""}),
    Use("Refitter.release_refit_resources", (), "11.4"),
    Use("OnnxParserRefitter.__init__", ("refitter", "logger")),
    *_methods("OnnxParserRefitter", {"refit_from_bytes": "model path", "get_error": "index"}),
    *_names("OnnxParserRefitter", "num_errors"),
    # -------------------------------------------------------------------------------- running
    Use("Runtime.__init__", ("logger",)),
    Use("Runtime.deserialize_cuda_engine", ("serialized_engine",)),
    *_methods("Runtime", {"load_runtime": "path"}),
    *_names("Runtime", "engine_host_code_allowed gpu_allocator DLA_core num_DLA_cores"),
    *_names(
        "ICudaEngine",
        "num_io_tensors num_layers num_optimization_profiles num_aux_streams refittable streamable_weights_size",
    ),
    *_names("ICudaEngine", "device_memory_size_v2 weight_streaming_budget_v2", "10.1"),
    *_names("ICudaEngine", "device_memory_size", until="11.0"),
    Use("ICudaEngine.get_weight_streaming_automatic_budget", (), "10.1"),
    *_methods(
        "ICudaEngine",
        {
            "get_tensor_name": "index",
            "get_tensor_mode": "name",
            "get_tensor_dtype": "name",
            "get_tensor_shape": "name",
            "get_tensor_location": "name",
            "get_tensor_profile_shape": "name profile_index",
            "get_tensor_profile_values": "name profile_index",
            "create_engine_inspector": "",
            "create_execution_context": "strategy",
        },
    ),
    *_methods("EngineInspector", {"get_engine_information": "format", "get_layer_information": "layer_index format"}),
    *_names("EngineInspector", "execution_context"),
    *_names("LayerInformationFormat", "JSON"),
    *_names("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED"),
    *_names("TensorIOMode", "INPUT"),
    *_names("TensorLocation", "HOST"),
    *_names("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 UINT8 BOOL FP8 INT4"),
    *_names("DataType", "FP4", "10.8"),
    *_names("DataType", "E8M0", "10.12"),
    *_methods(
        "IExecutionContext",
        {
            "set_input_shape": "name shape",
            "get_tensor_shape": "name",
            "set_tensor_address": "name memory",
            "set_output_allocator": "name output_allocator",
            "get_max_output_size": "name",
            "infer_shapes": "",
            "execute_async_v3": "stream_handle",
            "set_optimization_profile_async": "profile_index stream_handle",
            "update_device_memory_size_for_shapes": "",
            "report_to_profiler": "",
        },
    ),
    Use("IExecutionContext.set_device_memory", ("memory", "size"), "10.1"),
    *_names(
        "IExecutionContext",
        "device_memory active_optimization_profile enqueue_emits_profile profiler persistent_cache_limit",
    ),
)

_BY_NAME: dict[str, Use] = {use.name: use for use in SURFACE}
