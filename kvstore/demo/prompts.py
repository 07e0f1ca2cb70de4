"""The prompts of the demo: short and long ones, and two questions about one text."""

PASSAGE = """\
The lighthouse on Skerry Point was built in 1871 from granite that came by barge from the quarries of the mainland. \
Its lamp stood forty metres above the sea and could be seen from ships twenty miles away. For the first fifty years it \
burned oil, and the keeper carried every can up the one hundred and ninety steps by hand. In 1923 the lamp was changed \
to electricity, which came from a small generator in a shed behind the tower, and the keeper had time to plant a \
garden. He grew potatoes, cabbages and, against the advice of everyone who knew the island, roses.

The last keeper was a woman called Ingrid Dahl, who came to the island in 1958 with two suitcases and a cat. She wrote \
down the weather four times a day in a blue notebook, and when a notebook was full she sent it by the mail boat to the \
weather office in the town, where a clerk copied the figures into a ledger. In the winter of 1962 the mail boat could \
not land for seven weeks. Ingrid ate potatoes and dried fish, mended the roof of the shed with the wood of a wrecked \
rowing boat, and kept the light burning every night. When the boat came at last, its captain brought a letter that \
thanked her for twenty-eight missing reports, all of which she handed to him in a single parcel.

In 1984 the light was made to run by itself. Ingrid moved to the town, but she kept a key, and every spring until she \
died she went back to cut the roses."""

PROMPTS = (
    f"{PASSAGE}\n\nWho was the last keeper of the lighthouse?",
    "Hi!",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in two sentences, for a child of eight, why the sky is blue during the day and red in the evening.",
    f"{PASSAGE}\n\nWhat did the keepers grow in the garden?",
)
"""The first and the last share the passage, which is longer than the default prefill chunk."""
