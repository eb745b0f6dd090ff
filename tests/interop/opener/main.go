// Opens transactions as nodes do: go-ethereum decodes each line of the input, RLP in hex, and the
// output has its type, hash, sender and authorities, and whether it is encoded in the same way.
package main

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"

	"github.com/ethereum/go-ethereum/common"
	"github.com/ethereum/go-ethereum/core/types"
	"github.com/ethereum/go-ethereum/rlp"
)

type opened struct {
	Type        uint8            `json:"type"`
	Hash        common.Hash      `json:"hash"`
	Sender      common.Address   `json:"sender"`
	Authorities []common.Address `json:"authorities"`
	Same        bool             `json:"same"`
}

// open decodes one transaction and encodes it again.
func open(line string) (opened, error) {
	encoded, err := hex.DecodeString(line)
	if err != nil {
		return opened{}, err
	}
	var tx types.Transaction
	if err := rlp.DecodeBytes(encoded, &tx); err != nil {
		return opened{}, err
	}
	sender, err := types.Sender(types.LatestSignerForChainID(tx.ChainId()), &tx)
	if err != nil {
		return opened{}, err
	}
	authorities := []common.Address{}
	for _, each := range tx.SetCodeAuthorizations() {
		authority, err := each.Authority()
		if err != nil {
			return opened{}, err
		}
		authorities = append(authorities, authority)
	}
	again, err := rlp.EncodeToBytes(&tx)
	return opened{tx.Type(), tx.Hash(), sender, authorities, bytes.Equal(again, encoded)}, err
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		found, err := open(lines.Text())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if err := answers.Encode(found); err != nil {
			panic(err)
		}
	}
}
