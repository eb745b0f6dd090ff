from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BookmarkType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOOKMARK_TYPE_UNSPECIFIED: _ClassVar[BookmarkType]
    BOOKMARK_TYPE_BATCH: _ClassVar[BookmarkType]
    BOOKMARK_TYPE_L2_BLOCK: _ClassVar[BookmarkType]

class BatchType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BATCH_TYPE_UNSPECIFIED: _ClassVar[BatchType]
    BATCH_TYPE_REGULAR: _ClassVar[BatchType]
    BATCH_TYPE_FORCED: _ClassVar[BatchType]
    BATCH_TYPE_INJECTED: _ClassVar[BatchType]
    BATCH_TYPE_INVALID: _ClassVar[BatchType]
BOOKMARK_TYPE_UNSPECIFIED: BookmarkType
BOOKMARK_TYPE_BATCH: BookmarkType
BOOKMARK_TYPE_L2_BLOCK: BookmarkType
BATCH_TYPE_UNSPECIFIED: BatchType
BATCH_TYPE_REGULAR: BatchType
BATCH_TYPE_FORCED: BatchType
BATCH_TYPE_INJECTED: BatchType
BATCH_TYPE_INVALID: BatchType

class Debug(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...

class BookMark(_message.Message):
    __slots__ = ("type", "value")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    type: BookmarkType
    value: int
    def __init__(self, type: _Optional[_Union[BookmarkType, str]] = ..., value: _Optional[int] = ...) -> None: ...

class BatchStart(_message.Message):
    __slots__ = ("number", "type", "fork_id", "chain_id", "debug")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FORK_ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_ID_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    number: int
    type: BatchType
    fork_id: int
    chain_id: int
    debug: Debug
    def __init__(self, number: _Optional[int] = ..., type: _Optional[_Union[BatchType, str]] = ..., fork_id: _Optional[int] = ..., chain_id: _Optional[int] = ..., debug: _Optional[_Union[Debug, _Mapping]] = ...) -> None: ...

class L2Block(_message.Message):
    __slots__ = ("number", "batch_number", "timestamp", "delta_timestamp", "min_timestamp", "l1_blockhash", "l1_infotree_index", "hash", "state_root", "global_exit_root", "coinbase", "block_gas_limit", "block_info_root", "debug", "base_fee")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BATCH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    DELTA_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    MIN_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    L1_BLOCKHASH_FIELD_NUMBER: _ClassVar[int]
    L1_INFOTREE_INDEX_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    STATE_ROOT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_EXIT_ROOT_FIELD_NUMBER: _ClassVar[int]
    COINBASE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GAS_LIMIT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INFO_ROOT_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    BASE_FEE_FIELD_NUMBER: _ClassVar[int]
    number: int
    batch_number: int
    timestamp: int
    delta_timestamp: int
    min_timestamp: int
    l1_blockhash: bytes
    l1_infotree_index: int
    hash: bytes
    state_root: bytes
    global_exit_root: bytes
    coinbase: bytes
    block_gas_limit: int
    block_info_root: bytes
    debug: Debug
    base_fee: bytes
    def __init__(self, number: _Optional[int] = ..., batch_number: _Optional[int] = ..., timestamp: _Optional[int] = ..., delta_timestamp: _Optional[int] = ..., min_timestamp: _Optional[int] = ..., l1_blockhash: _Optional[bytes] = ..., l1_infotree_index: _Optional[int] = ..., hash: _Optional[bytes] = ..., state_root: _Optional[bytes] = ..., global_exit_root: _Optional[bytes] = ..., coinbase: _Optional[bytes] = ..., block_gas_limit: _Optional[int] = ..., block_info_root: _Optional[bytes] = ..., debug: _Optional[_Union[Debug, _Mapping]] = ..., base_fee: _Optional[bytes] = ...) -> None: ...

class Transaction(_message.Message):
    __slots__ = ("l2block_number", "index", "is_valid", "encoded", "effective_gas_price_percentage", "im_state_root", "debug")
    L2BLOCK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    IS_VALID_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_GAS_PRICE_PERCENTAGE_FIELD_NUMBER: _ClassVar[int]
    IM_STATE_ROOT_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    l2block_number: int
    index: int
    is_valid: bool
    encoded: bytes
    effective_gas_price_percentage: int
    im_state_root: bytes
    debug: Debug
    def __init__(self, l2block_number: _Optional[int] = ..., index: _Optional[int] = ..., is_valid: _Optional[bool] = ..., encoded: _Optional[bytes] = ..., effective_gas_price_percentage: _Optional[int] = ..., im_state_root: _Optional[bytes] = ..., debug: _Optional[_Union[Debug, _Mapping]] = ...) -> None: ...

class BatchEnd(_message.Message):
    __slots__ = ("number", "local_exit_root", "state_root", "debug")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_EXIT_ROOT_FIELD_NUMBER: _ClassVar[int]
    STATE_ROOT_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    number: int
    local_exit_root: bytes
    state_root: bytes
    debug: Debug
    def __init__(self, number: _Optional[int] = ..., local_exit_root: _Optional[bytes] = ..., state_root: _Optional[bytes] = ..., debug: _Optional[_Union[Debug, _Mapping]] = ...) -> None: ...

class UpdateGER(_message.Message):
    __slots__ = ("batch_number", "timestamp", "global_exit_root", "coinbase", "fork_id", "chain_id", "state_root", "debug")
    BATCH_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_EXIT_ROOT_FIELD_NUMBER: _ClassVar[int]
    COINBASE_FIELD_NUMBER: _ClassVar[int]
    FORK_ID_FIELD_NUMBER: _ClassVar[int]
    CHAIN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_ROOT_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    batch_number: int
    timestamp: int
    global_exit_root: bytes
    coinbase: bytes
    fork_id: int
    chain_id: int
    state_root: bytes
    debug: Debug
    def __init__(self, batch_number: _Optional[int] = ..., timestamp: _Optional[int] = ..., global_exit_root: _Optional[bytes] = ..., coinbase: _Optional[bytes] = ..., fork_id: _Optional[int] = ..., chain_id: _Optional[int] = ..., state_root: _Optional[bytes] = ..., debug: _Optional[_Union[Debug, _Mapping]] = ...) -> None: ...

class L2BlockEnd(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...
