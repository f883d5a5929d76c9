"""What of the transformers library and of accelerate this is written for; imported before either."""

from shardkit._registry import require_installed

for _library, _requires in (("transformers", "transformers>=5.22.2"), ("accelerate", "accelerate>=1.15")):
    require_installed("shardkit.transformers", _library, _requires, 'pip install "shardkit[transformers]"')
