"""Protobuf messages to tuples and back, driven by a table of their fields.

Owns the encoding of flat messages of numbers, bytes and one text. Must not know the events: the
`schema` that a `MessageCodec` is made from describes them.

Reading follows proto3: fields in any order, the last of repeated fields counts, numbers are
truncated to the width of their field. Unknown fields, which a known number with another wire type
is, too, are kept as they came if the event has a value for them, except for those of the text. No
input reads outside its buffer.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

from datastreamer.selection._protobuf cimport (
    BOOL, BYTES, DEBUG, ENUM, FULL_U64, LENGTH, MAX_FIELDS, U32, U64, VARINT, read_size, read_tag,
    read_varint, skip_value,
)

cdef object _new_tuple = tuple.__new__
cdef uint64_t U64_MAX = 0xFFFFFFFFFFFFFFFF
cdef uint64_t U32_MAX = 0xFFFFFFFF


cdef class MessageCodec:
    """Reads and writes messages of one kind.

    ``MessageCodec(schema.Message)``: an event is an instance of the message's class. If that has
    one value more than the message has fields, it is the unknown fields, encoded.
    """

    cdef readonly object cls
    cdef readonly str name
    cdef int count
    cdef bint keeps
    cdef uint8_t kinds[MAX_FIELDS + 1]
    cdef tuple names
    cdef list defaults
    cdef list enums

    def __cinit__(self, message):
        self.cls, self.name, fields = message
        if not 1 <= len(fields) <= MAX_FIELDS:
            raise ValueError(f"a message of {len(fields)} fields")
        self.count = len(fields)
        self.names = self.cls._fields
        self.defaults = list(self.cls())
        self.keeps = len(self.defaults) > self.count
        self.enums = [None] * self.count
        for at, field in enumerate(fields):
            self.kinds[at] = field.kind
            if field.kind == ENUM:
                self.enums[at] = {int(member): member for member in type(self.defaults[at])}

    def read(self, data):
        """Decode a message as a `cls`. Raises `ValueError`, which names the byte and the error."""
        cdef Py_buffer view
        if type(data) is bytes:
            return self._read(<const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            return self._read(<const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef object _read(self, const uint8_t* start, Py_ssize_t size):
        cdef const uint8_t* p = start
        cdef const uint8_t* end = start + size
        cdef const uint8_t* at
        cdef uint32_t tag = 0, wanted
        cdef uint64_t value = 0
        cdef int field, kind
        cdef list values = self.defaults.copy()
        cdef bytearray unknown = None
        while p < end:
            at = p
            p = read_tag(p, end, &tag)
            if p == NULL or tag >> 3 == 0:
                raise ValueError(f"at byte {at - start}: no field begins there")
            field = <int>(tag >> 3) - 1 if tag >> 3 <= MAX_FIELDS else MAX_FIELDS
            kind = self.kinds[field] if field < self.count else 0
            wanted = LENGTH if kind >= BYTES else VARINT
            if not kind or tag & 7 != wanted:
                p = skip_value(p, end, tag, 0)
                if p == NULL:
                    raise ValueError(f"at byte {at - start}: unknown field {tag >> 3} is cut off")
                if self.keeps:
                    if unknown is None:
                        unknown = bytearray()
                    unknown += PyBytes_FromStringAndSize(<const char*>at, p - at)
                continue
            p = read_size(p, end, &value) if wanted == LENGTH else read_varint(p, end, &value)
            if p == NULL:
                raise ValueError(f"at byte {at - start}: {self.names[field]} is cut off")
            if kind == U64 or kind == FULL_U64:
                values[field] = value
            elif kind == U32:
                values[field] = <uint32_t>value
            elif kind == BOOL:
                values[field] = value != 0
            elif kind == ENUM:
                number = <int32_t><uint32_t>value
                values[field] = (<dict>self.enums[field]).get(number, number)
            else:
                if value > <uint64_t>(end - p):
                    raise ValueError(
                        f"at byte {at - start}: {self.names[field]} has a length of {value} "
                        f"bytes, but {end - p} follow"
                    )
                if kind == DEBUG:
                    values[field] = self._text(start, p, p + value, values[field])
                else:
                    values[field] = PyBytes_FromStringAndSize(<const char*>p, value)
                p += value
        if unknown is not None:
            values[self.count] = bytes(unknown)
        return _new_tuple(self.cls, values)

    cdef object _text(
        self, const uint8_t* start, const uint8_t* p, const uint8_t* end, object before
    ):
        """The text of a Debug message; of repeated fields the last one."""
        cdef const uint8_t* at
        cdef uint32_t tag = 0
        cdef uint64_t value = 0
        text = "" if before is None else before
        while p < end:
            at = p
            p = read_tag(p, end, &tag)
            if p == NULL or tag >> 3 == 0:
                raise ValueError(f"at byte {at - start}: no field of debug begins there")
            if tag >> 3 != 1 or tag & 7 != LENGTH:
                p = skip_value(p, end, tag, 1)
                if p == NULL:
                    raise ValueError(
                        f"at byte {at - start}: unknown field {tag >> 3} of debug is cut off"
                    )
                continue
            p = read_size(p, end, &value)
            if p == NULL or value > <uint64_t>(end - p):
                raise ValueError(f"at byte {at - start}: debug.message is cut off")
            try:
                text = PyUnicode_DecodeUTF8(<char*>p, value, "strict")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"at byte {p - start + error.start}: debug.message is not UTF-8"
                ) from None
            p += value
        return text

    def write(self, values):
        """Encode a message from its values, in the order of the fields.

        Raises `ValueError` if a value does not fit its field.
        """
        cdef bytearray out = bytearray()
        cdef int at, kind
        if len(values) != len(self.defaults):
            raise ValueError(f"{self.name} has {len(self.defaults)} values, not {len(values)}")
        for at in range(self.count):
            value = values[at]
            kind = self.kinds[at]
            if kind >= BYTES:
                if kind == DEBUG:
                    if value is None:
                        continue
                    value = self._debug(value)
                else:
                    value = self._bytes(at, value)
                    if not value:
                        continue
                out.append((at + 1) << 3 | LENGTH)
                _put(out, len(value))
                out += value
            else:
                number = self._number(at, kind, value)
                if number:
                    out.append((at + 1) << 3)
                    _put(out, number)
        if self.keeps:
            unknown = self._bytes(self.count, values[self.count])
            out += unknown
            if unknown and self.read(out)[self.count] != unknown:
                raise ValueError(f"{self.name}.unknown has a field that is known")
        return bytes(out)

    cdef bytes _bytes(self, int at, value):
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise ValueError(f"{self.name}.{self.names[at]} must be bytes, not {value!r}")
        return bytes(value)

    cdef bytes _debug(self, value):
        cdef bytearray out
        if not isinstance(value, str):
            raise ValueError(f"{self.name}.debug must be text or None, not {value!r}")
        try:
            text = value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{self.name}.debug cannot be encoded as UTF-8: {value!r}") from None
        out = bytearray()
        if text:
            out.append(1 << 3 | LENGTH)
            _put(out, len(text))
            out += text
        return bytes(out)

    cdef uint64_t _number(self, int at, int kind, value) except? 0:
        if not isinstance(value, int):
            raise ValueError(f"{self.name}.{self.names[at]} must be a number, not {value!r}")
        if kind == ENUM:
            least, most = -(1 << 31), (1 << 31) - 1
        elif kind == BOOL:
            least, most = 0, 1
        else:
            least, most = 0, (U32_MAX if kind == U32 else U64_MAX)
        if not least <= value <= most:
            raise ValueError(f"{self.name}.{self.names[at]} must be {least} to {most}, not {value}")
        return <uint64_t>(value & U64_MAX)


cdef void _put(bytearray out, uint64_t value):
    while value > 0x7F:
        out.append(<uint8_t>(value & 0x7F | 0x80))
        value >>= 7
    out.append(<uint8_t>value)
