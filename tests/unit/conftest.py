from hypothesis import settings

# A busy machine is no failure.
settings.register_profile("unit", deadline=None, max_examples=60)
settings.load_profile("unit")
