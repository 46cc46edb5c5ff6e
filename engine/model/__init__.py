"""The model side: loader, runner, sampler, detokenizer. Needs torch and transformers."""
