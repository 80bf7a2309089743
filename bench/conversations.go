// Package bench measures what kvgate does: conversations replayed over HTTP, a
// routing lab in virtual time, and proxies side by side.
package bench

import (
	"bufio"
	"bytes"
	_ "embed" // the conversations
	"encoding/json"
	"fmt"
)

//go:embed testdata/conversations.jsonl
var conversationsJSONL []byte

// Message is one chat message.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Conversation is a recorded dialogue. Its requests are the prefixes that end
// before an answer: each holds the one before.
type Conversation struct {
	Source   string    `json:"source"`
	Messages []Message `json:"messages"`
}

// Turns returns the requests of the conversation: message lists, each a prefix of the next.
func (c Conversation) Turns() [][]Message {
	var turns [][]Message
	for i, m := range c.Messages {
		if m.Role == "assistant" && i > 0 {
			turns = append(turns, c.Messages[:i])
		}
	}
	return turns
}

// Conversations returns the embedded real dialogues (testdata/LICENSES.md says whose they are).
func Conversations() ([]Conversation, error) {
	var out []Conversation
	lines := bufio.NewScanner(bytes.NewReader(conversationsJSONL))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var c Conversation
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return nil, fmt.Errorf("conversations.jsonl:%d: %w", len(out)+1, err)
		}
		out = append(out, c)
	}
	return out, lines.Err()
}
