"""Tokenizers: round trips, forgery, reproducibility, ids spelt alike."""

import json
import pickle
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
import pytest

from envace_jax.text import tokenizer

CALL = '{"name": "get_order", "arguments": {"order_id": "O12"}}'
HOSTILE = (
  ''.join(tokenizer.CONTROL)
  + ' \u2581\ue000\ue001\ue004\x00\n\n\t\r  a  b \ud800 \U0001f600 e\u0301 '
)


def _corpus(n=150):
  rng = random.Random(0)
  for _ in range(n):
    order, other = f'O{rng.randint(10, 60)}', f'O{rng.randint(10, 60)}'
    user = rng.choice(['Ana', 'Bob', 'Chen'])
    status = rng.choice(['shipped', 'pending'])
    tool = rng.choice(['get_order', 'cancel_order'])
    call = {'name': tool, 'arguments': {'order_id': order}}
    record = {'order_id': order, 'user': user, 'status': status, 'total': 12.5}
    yield (
      f'<|user|>Cancel order {order}.<|end|>'
      f'<|act|><tool_call>{json.dumps(call)}</tool_call><|end|>'
      f'<|rehearse|><tool_response>{json.dumps(record)}</tool_response><|end|>'
      f'<|act|>It is {status}.<|end|>'
    )
    yield f"Is {user}'s blue mug in {order}, or in {other}?"
    yield json.dumps({'error': 'not_pending', 'detail': f'{order} is {status}'})


@pytest.fixture(scope='module')
def trained():
  return tokenizer.SentencePieceTokenizer.train(_corpus(), 2000)


@pytest.fixture(params=['bytes', 'pieces'])
def any_tokenizer(request, trained):
  return tokenizer.ByteTokenizer() if request.param == 'bytes' else trained


def _pieces(tok, text):
  return [tok.decode([i]) for i in tok.encode(text)]


def test_control_pieces_are_distinct_and_pad_is_zero(any_tokenizer):
  control = any_tokenizer.control
  assert set(control) - set(tokenizer.THOUGHTS) == set(tokenizer.CONTROL)
  assert len(set(control.values())) == len(control)
  assert any_tokenizer.pad_id == control['<|pad|>'] == 0
  assert max(control.values()) < any_tokenizer.vocab_size
  for name, i in control.items():
    assert any_tokenizer.decode([i, i]) == name * 2


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=())))
@example(text=HOSTILE)
@example(text=CALL)
@example(text='\ud800')
def test_any_text_round_trips_and_forges_nothing(trained, text):
  for tok in (trained, tokenizer.ByteTokenizer()):
    ids = tok.encode(text)
    assert tok.decode(ids) == tokenizer.clean_surrogates(text)
    assert not set(ids) & set(tok.control.values())
    assert all(0 <= i < tok.vocab_size for i in ids)


def test_control_names_in_the_corpus_stay_ordinary():
  lines = [f'say <|act|> and </tool_call> in {i}' for i in range(50)]
  tok = tokenizer.SentencePieceTokenizer.train(lines, 600)
  assert not set(tok.encode(HOSTILE)) & set(tok.control.values())
  assert tok.decode(tok.encode(HOSTILE)) == tokenizer.clean_surrogates(HOSTILE)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(-5, 3000)))
def test_decode_is_total(trained, ids):
  assert isinstance(trained.decode(ids), str)
  assert isinstance(tokenizer.ByteTokenizer().decode(ids), str)


def test_bad_bytes_and_bad_ids_become_replacement_characters():
  tok = tokenizer.ByteTokenizer()
  first_of_two = tok.encode('é')[:1]
  assert tok.decode(first_of_two) == '\ufffd'
  assert tok.decode([*first_of_two, tok.control['<|end|>']]) == '\ufffd<|end|>'
  assert tok.decode([-1, tok.vocab_size]) == '\ufffd\ufffd'


@given(text=st.text(st.characters(exclude_categories=()), max_size=60))
@example(text=HOSTILE)
def test_segments_join_to_the_text(text):
  assert ''.join(tokenizer.split(text)) == tokenizer.clean_surrogates(text)


@pytest.mark.parametrize(
  'text, segments',
  [
    ('Cancel order O12.', 'Cancel| |order| |O12|.'),
    ("Ana's O12, please", "Ana|'s |O12|, |please"),
    ('{"order_id": "O12"}', '{"order_id": "|O12|"}'),
    (CALL, '{"name": "get_order", "arguments": {"order_id": "|O12|"}}'),
    ('{"total": 12.5, "n": 3}', '{"total": |12.5|, "n": |3|}'),
    ('{"O12": 1, "ok": true}', '{"|O12|": |1|, "ok": |true|}'),
    ('{"ids": ["O1", "O2"]}', '{"ids": ["|O1|", "|O2|"]}'),
    ('{"note": "x\\nO12"}', '{"note": "|x|\\n|O12|"}'),
    ('{"note": "cut off O12', '{"note": "|cut| |off| |O12'),
    ('a@b.co costs 1,200.50', 'a@b.co| |costs| |1,200.50'),
    ('取消O12吧', '取消|O12|吧'),
  ],
)
def test_segments(text, segments):
  assert '|'.join(tokenizer.split(text)) == segments
  delimited = tokenizer.split_for_training(text)
  assert delimited == segments.replace('|', tokenizer.DELIMITER)
  assert tokenizer.split_for_training(delimited) == delimited


def test_a_call_is_three_pieces(trained):
  head = '{"name": "get_order", "arguments": {"order_id": "'
  assert _pieces(trained, CALL) == [head, 'O12', '"}}']
  prose = _pieces(trained, 'Cancel order O12.')
  assert prose == ['Cancel', ' ', 'order', ' ', 'O12', '.']


def test_every_known_segment_is_one_piece_when_there_is_room(trained):
  delimited = [tokenizer.split_for_training(text) for text in _corpus()]
  known = {s for line in delimited for s in line.split(tokenizer.DELIMITER)}
  assert [s for s in known if len(trained.encode(s)) > 1] == []


def test_a_rare_segment_is_one_piece_too():
  corpus = [*_corpus(1000), 'Yann', '"Quux Ωmega"']
  tok = tokenizer.SentencePieceTokenizer.train(corpus, 2000)
  for word in ('Yann', 'Quux', 'Ωmega'):
    assert len(tok.encode(word)) == 1


# O77 is not in the corpus: several pieces, but the same ones everywhere.
@pytest.mark.parametrize('value', ['O12', 'O77', 'Ana', 'Zoë', '12.5', '837'])
@pytest.mark.parametrize('vocab_size', [330, 2000])
def test_a_value_is_spelt_alike_in_every_context(value, vocab_size):
  tok = tokenizer.SentencePieceTokenizer.train(_corpus(40), vocab_size)
  alone = tok.encode(value)
  contexts = [
    f'Cancel {value}.',
    f'{value}, or {value}?',
    f"Is {value}'s order here",
    f'({value})',
    json.dumps({'order_id': value}),
    json.dumps({'name': 'get_order', 'arguments': {'order_id': value}}),
    json.dumps({'ids': ['O1', value, 'O2']}),
    json.dumps({'detail': f'order {value} is\n{value}'}),
    f'{{"total": {value}, "user": "{value}',
  ]
  for text in contexts:
    ids = tok.encode(text)
    n = len(alone)
    found = sum(ids[i : i + n] == alone for i in range(len(ids)))
    assert found == text.count(value), text


@pytest.mark.parametrize('vocab_size', [330, 400, 2000])
def test_vocab_size_is_a_cap(vocab_size):
  tok = tokenizer.SentencePieceTokenizer.train(_corpus(), vocab_size)
  assert 268 < tok.vocab_size <= vocab_size


def test_too_small_a_vocabulary_or_no_text_is_a_named_error():
  with pytest.raises(ValueError, match='vocab_size=270'):
    tokenizer.SentencePieceTokenizer.train(_corpus(), 270)
  with pytest.raises(ValueError, match='no text'):
    tokenizer.SentencePieceTokenizer.train(['', '<|act|>'], 400)


def test_training_is_reproducible_to_the_byte(trained, tmp_path):
  again = tokenizer.SentencePieceTokenizer.train(_corpus(), 2000)
  trained.save(tmp_path / 'a')
  again.save(tmp_path / 'b')
  assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()
  assert b'seeds.tsv' not in (tmp_path / 'a').read_bytes()


def test_save_load_and_pickle_keep_the_ids(any_tokenizer, tmp_path):
  any_tokenizer.save(tmp_path / 'tokenizer')
  copies = [
    tokenizer.load(tmp_path / 'tokenizer'),
    pickle.loads(pickle.dumps(any_tokenizer)),
  ]
  for text in (CALL, HOSTILE, 'It is shipped.'):
    for copy in copies:
      assert copy.encode(text) == any_tokenizer.encode(text)
      assert copy.vocab_size == any_tokenizer.vocab_size


def test_a_model_without_our_control_pieces_is_refused():
  with pytest.raises((ValueError, RuntimeError)):
    tokenizer.SentencePieceTokenizer(b'not a model')
