package agents

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// codec is gRPC's, but for updates of Sync. With many revocations one has megabytes, and an agent that does not read holds one
// or two in memory: so all streams share the bytes.
type codec struct{ encoding.CodecV2 }

// NewCodec returns what a server needs that serves a Hub's streams.
func NewCodec() encoding.CodecV2 { return codec{encoding.GetCodecV2(proto.Name)} }

// encoded is an update in parts, each a message by itself; a parser merges what follows one upon the other. Streams share most of them.
type encoded struct{ parts mem.BufferSlice }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if e, ok := v.(*encoded); ok {
		return e.parts, nil
	}
	return c.CodecV2.Marshal(v)
}
