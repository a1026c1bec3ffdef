"""Table of named language models. facts.py and spec.py derive sizes from it.

Source: each model's published configuration (config.json on huggingface.co), and: Touvron et al., "Llama 2", arXiv:2307.09288, table 1;
Grattafiori et al., "The Llama 3 Herd of Models", arXiv:2407.21783, table 3; Jiang et al., "Mistral 7B", arXiv:2310.06825, table 1
(mistral-7b is v0.3: a larger vocabulary, no window); Jiang et al., "Mixtral of Experts", arXiv:2401.04088, table 1; "Qwen2.5 Technical
Report", arXiv:2412.15115, table 1; "Qwen3 Technical Report", arXiv:2505.09388, tables 1 and 2; "Gemma 2", arXiv:2408.00118, table 1;
"Gemma 3", arXiv:2503.19786; "DeepSeek-V2", arXiv:2405.04434, section 3.1.2; "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 4.2;
Almazrouei et al., "The Falcon Series", arXiv:2311.16867; Zhang et al., "OPT", arXiv:2205.01068, table 1; Radford et al., "Language Models
are Unsupervised Multitask Learners", 2019 (GPT-2); Brown et al., "Language Models are Few-Shot Learners", arXiv:2005.14165, table 2.1
(GPT-3 175B). For multimodal models, the language model.
"""

from pathlib import Path
from typing import Final

from kvstore.kvcache.models.facts import Experts, LatentAttention, ModelFacts, SlidingWindow
from kvstore.kvcache.models.table import find_facts, is_file_name

_MLA: Final = LatentAttention(kv_rank=512, rope_dim=64, value_dim=128, query_rank=1536)
_MLA_LITE: Final = LatentAttention(kv_rank=512, rope_dim=64, value_dim=128)

MODELS: Final[dict[str, ModelFacts]] = {
    facts.name: facts
    for facts in (
        ModelFacts("llama2-7b", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000),
        ModelFacts("llama2-13b", layers=40, hidden=5120, heads=40, kv_heads=40, head_dim=128, ffn=13824, vocab=32000),
        ModelFacts("llama2-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=32000),
        ModelFacts("llama3-8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256),
        ModelFacts("llama3-70b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256),
        ModelFacts("llama3-405b", layers=126, hidden=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256),
        ModelFacts("llama3.2-1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, is_tied=True),
        ModelFacts("llama3.2-3b", layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, ffn=8192, vocab=128256, is_tied=True),
        ModelFacts(
            "mistral-7b-v0.1",
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            ffn=14336,
            vocab=32000,
            window=SlidingWindow(4096, layers=32),
        ),
        ModelFacts("mistral-7b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32768),
        ModelFacts("mistral-nemo-12b", layers=40, hidden=5120, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=131072),
        ModelFacts(
            "mixtral-8x7b",
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            ffn=14336,
            vocab=32000,
            experts=Experts(8, 2, ffn=14336),
        ),
        ModelFacts(
            "mixtral-8x22b",
            layers=56,
            hidden=6144,
            heads=48,
            kv_heads=8,
            head_dim=128,
            ffn=16384,
            vocab=32000,
            experts=Experts(8, 2, ffn=16384),
        ),
        ModelFacts("qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, vocab=152064),
        ModelFacts("qwen2.5-32b", layers=64, hidden=5120, heads=40, kv_heads=8, head_dim=128, ffn=27648, vocab=152064),
        ModelFacts("qwen2.5-72b", layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=29568, vocab=152064),
        ModelFacts("qwen3-8b", layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=12288, vocab=151936),
        ModelFacts("qwen3-32b", layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, ffn=25600, vocab=151936),
        ModelFacts(
            "qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            head_dim=128,
            ffn=6144,
            vocab=151936,
            experts=Experts(128, 8, ffn=768),
        ),
        ModelFacts(
            "qwen3-235b-a22b",
            layers=94,
            hidden=4096,
            heads=64,
            kv_heads=4,
            head_dim=128,
            ffn=12288,
            vocab=151936,
            experts=Experts(128, 8, ffn=1536),
        ),
        ModelFacts(
            "gemma-2-9b",
            layers=42,
            hidden=3584,
            heads=16,
            kv_heads=8,
            head_dim=256,
            ffn=14336,
            vocab=256000,
            is_tied=True,
            window=SlidingWindow(4096, layers=21),
        ),
        ModelFacts(
            "gemma-3-12b",
            layers=48,
            hidden=3840,
            heads=16,
            kv_heads=8,
            head_dim=256,
            ffn=15360,
            vocab=262208,
            is_tied=True,
            window=SlidingWindow(1024, layers=40),
        ),
        ModelFacts(
            "gemma-3-27b",
            layers=62,
            hidden=5376,
            heads=32,
            kv_heads=16,
            head_dim=128,
            ffn=21504,
            vocab=262208,
            is_tied=True,
            window=SlidingWindow(1024, layers=52),
        ),
        ModelFacts(
            "deepseek-v2-lite",
            layers=27,
            hidden=2048,
            heads=16,
            kv_heads=16,
            head_dim=192,
            ffn=10944,
            vocab=102400,
            latent=_MLA_LITE,
            experts=Experts(64, 6, ffn=1408, shared_ffn=2816, dense_layers=1),
        ),
        ModelFacts(
            "deepseek-v2",
            layers=60,
            hidden=5120,
            heads=128,
            kv_heads=128,
            head_dim=192,
            ffn=12288,
            vocab=102400,
            latent=_MLA,
            experts=Experts(160, 6, ffn=1536, shared_ffn=3072, dense_layers=1),
        ),
        ModelFacts(
            "deepseek-v3",
            layers=61,
            hidden=7168,
            heads=128,
            kv_heads=128,
            head_dim=192,
            ffn=18432,
            vocab=129280,
            weight_bits=8,
            latent=_MLA,
            experts=Experts(256, 8, ffn=2048, shared_ffn=2048, dense_layers=3),
        ),
        ModelFacts(
            "falcon-7b", layers=32, hidden=4544, heads=71, kv_heads=1, head_dim=64, ffn=18176, vocab=65024, is_gated=False, is_tied=True
        ),
        ModelFacts(
            "opt-6.7b", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384, vocab=50272, is_gated=False, is_tied=True
        ),
        ModelFacts("gpt-2", layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=3072, vocab=50257, is_gated=False, is_tied=True),
        ModelFacts(
            "gpt-3", layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=49152, vocab=50257, is_gated=False, is_tied=True
        ),
    )
}


SAME_SHAPE: Final = {
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "llama3.3-70b": "llama3-70b",
    "mistral-7b-v0.3": "mistral-7b",
    "deepseek-r1": "deepseek-v3",
}
"""Models that are fine-tuned from, or have the shape of, a model of the table."""


def find_model(name: str) -> ModelFacts:
    """Return the model of this name or of the same shape, in any case, or of the file `name` if it ends in .json: a
    Hugging Face config.json, or an object with the fields of ModelFacts.

    Raises:
        ConfigError: an unknown name (the text lists the known ones), or an invalid file.
    """
    if is_file_name(name):
        return ModelFacts.from_file(Path(name))
    return find_facts(SAME_SHAPE.get(name.lower(), name), MODELS, ModelFacts, noun="model", other_files="a Hugging Face config.json")
