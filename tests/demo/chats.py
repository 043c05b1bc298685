"""Chats written for the goldens of demo-chat: plain and awkward, of one turn and of several."""

# ruff: noqa: E501

from __future__ import annotations

Chat = list[dict[str, str]]

CHATS: dict[str, Chat] = {
    "question": [{"role": "user", "content": "What is the capital of France?"}],
    "system": [
        {"role": "system", "content": "You are a cook who answers in one short sentence."},
        {"role": "user", "content": "How do I keep rice from sticking to the pot?"},
    ],
    "turns": [
        {"role": "user", "content": "My dog is called Bella. She is 12 years old."},
        {"role": "assistant", "content": "Bella is a lovely name! How is she doing?"},
        {"role": "user", "content": "She sleeps a lot. What is her name, and how old is she?"},
    ],
    "digits": [{"role": "user", "content": "Copy these numbers: 7 42 1234 5.6 and 3,000 (½ of 6000)."}],
    "awkward": [
        {"role": "user", "content": "Zug ans Meer:  fährt um zwölf\n\n\tl'été 海へ 🚂\nTranslate, please!"}
    ],
    "code": [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "def add(a, b):\n    return a + b\n\nWrite the same for multiplication."},
    ],
    "long": [
        {
            "role": "user",
            "content": "Rivers do not keep to their beds. Where the ground is flat, a small bend grows by itself: "
            "the water on the outside of the curve runs faster and takes earth away, while on the inside it is "
            "slow and lets sand fall. Over the years the loops become wider and move down the valley, until two "
            "of them touch. In the next flood the river takes the short way, and the old loop is left behind as "
            "a lake in the shape of a horseshoe.\n\nExplain in simple words why such a lake comes to be.",
        }
    ],
}
